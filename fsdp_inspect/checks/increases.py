"""What grew: which category of memory, or which part of the step, in which units, by how much?

Two moments are compared unit by unit and category by category; two steps part by part, and wait by
wait. What grew is named until it accounts for nearly all that grew; alike units (`layers.0`,
`layers.1`) are named together.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.checks.measurements import Held
from fsdp_inspect.checks.unit_rows import in_words_and_numbers

_NEARLY_ALL = 0.95
_LEAST_SHARE = 0.05
"""Of all that grew; less is named only if nothing else is left."""
_BESIDE_THE_LONGEST = 0.25
"""Times vary: of what takes longer only that is named which grew by this share of the most."""
_EXPOSED = "exposed_"
"""How the parts of a step that are waits begin."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Increase:
    """One category of memory that grew in some units, or one part of the step that takes longer."""

    category: str
    """`activation`; of times a part of the step (`exposed_all_gather`), or what is waited for and
    where (`all_gather in backward`)."""
    units: tuple[str, ...]
    """Those that grew, by name; none for a part of the step."""
    before: int
    """Bytes at the moment, or ns a step, of these units together."""
    after: int

    @property
    def increase(self) -> int:
        """By how much, bytes or ns."""
        return self.after - self.before

    @property
    def where(self) -> str:
        """The units in short: `layers.*` for several whose names differ in a number."""
        return abbreviate_units(self.units)


def find_increases(before: Held, after: Held) -> tuple[Increase, ...]:
    """What grew between two moments, largest first.

    Args:
        before: Bytes by unit and category at the baseline's moment.
        after: At the run's.
    """
    grown = [
        _grown(category, units, before, after)
        for category, units in _rises(before, after).items()
        if _is_net(category, before, after)
    ]
    return tuple(_until_nearly_all(sorted(grown, key=lambda one: -one.increase)))


def find_longer(
    parts_before: Mapping[str, int],
    parts_after: Mapping[str, int],
    waits_before: Held,
    waits_after: Held,
) -> tuple[Increase, ...]:
    """What of a step takes longer: its parts, then the waits inside of them, each longest first.

    Args:
        parts_before: ns by part of the step, in the baseline; empty: only waits are in question.
        parts_after: In the run.
        waits_before: ns a step by unit and what is waited for, in the baseline.
        waits_after: In the run.
    """
    parts = [
        Increase(name, (), parts_before.get(name, 0), amount)
        for name, amount in parts_after.items()
        if parts_before and amount > parts_before.get(name, 0)
    ]
    parts = _beside_the_longest(parts)
    is_of_waits = not parts_before or any(one.category.startswith(_EXPOSED) for one in parts)
    if not (waits_before and is_of_waits):
        return tuple(parts)
    waits = []
    for category, units in _rises(waits_before, waits_after).items():
        alone = [_grown(category, [unit], waits_before, waits_after) for unit in units]
        longest = _beside_the_longest(alone)
        named = [unit for one in longest for unit in one.units]
        waits.append(_grown(category, named, waits_before, waits_after))
    return (*parts, *_beside_the_longest(waits))


def _rises(before: Held, after: Held) -> dict[str, list[str]]:
    """The units in which each category rose."""
    rises: dict[str, list[str]] = {}
    for unit, category in dict.fromkeys([*after, *before]):
        if after.get((unit, category), 0) > before.get((unit, category), 0):
            rises.setdefault(category, []).append(unit)
    return rises


def _grown(category: str, units: Sequence[str], before: Held, after: Held) -> Increase:
    return Increase(
        category,
        tuple(sorted(units, key=in_words_and_numbers)),
        sum(before.get((unit, category), 0) for unit in units),
        sum(after.get((unit, category), 0) for unit in units),
    )


def _is_net(category: str, before: Held, after: Held) -> bool:
    """Whether a category grew altogether, and did not only move from unit to unit."""
    return _total(category, after) > _total(category, before)


def _total(category: str, held: Held) -> int:
    return sum(amount for (_, name), amount in held.items() if name == category)


def _until_nearly_all(grown: Sequence[Increase]) -> list[Increase]:
    total, named = sum(one.increase for one in grown), 0
    kept: list[Increase] = []
    for one in grown:
        if kept and (named >= _NEARLY_ALL * total or one.increase < _LEAST_SHARE * total):
            break
        kept.append(one)
        named += one.increase
    return kept


def _beside_the_longest(longer: Sequence[Increase]) -> list[Increase]:
    most = max((one.increase for one in longer), default=0)
    kept = [one for one in longer if one.increase >= _BESIDE_THE_LONGEST * most]
    return sorted(kept, key=lambda one: -one.increase)


def abbreviate_units(units: Sequence[str]) -> str:
    """`layers.3`; `layers.*` for three or more that differ in a number; else the names."""
    patterns = list(dict.fromkeys(_NUMBER.sub("*", unit) for unit in units))
    if len(units) > 2 and len(patterns) < len(units):
        return ", ".join(patterns)
    return ", ".join(units)
