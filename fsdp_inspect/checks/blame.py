"""What grew at the peak: which category, in which units, by how much?

Two peaks are compared unit by unit and category by category. What grew is named until it accounts
for nearly all that grew; alike units (`layers.0`, `layers.1`) are named together.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.checks.folding import in_words_and_numbers
from fsdp_inspect.checks.reading import Held

_NEARLY_ALL = 0.95
_LEAST_SHARE = 0.05
"""Of all that grew; less is named only if nothing else is left."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Growth:
    """One category that grew in some units."""

    category: str
    units: tuple[str, ...]
    """Those that grew, by name."""
    before: int
    """Bytes at the peak, of these units together."""
    after: int

    @property
    def bytes(self) -> int:
        """By how much."""
        return self.after - self.before

    @property
    def where(self) -> str:
        """The units in short: `layers.*` for several whose names differ in a number."""
        return name_units(self.units)


def find_growth(before: Held, after: Held) -> tuple[Growth, ...]:
    """What grew between two peaks, largest first.

    Args:
        before: Bytes by unit and category at the baseline's peak.
        after: At the run's.
    """
    changes = {
        key: after.get(key, 0) - before.get(key, 0) for key in dict.fromkeys([*after, *before])
    }
    by_category: dict[str, list[str]] = {}
    for (unit, category), change in changes.items():
        if change > 0 and _is_net(category, changes):
            by_category.setdefault(category, []).append(unit)
    grown = [
        Growth(
            category,
            tuple(sorted(units, key=in_words_and_numbers)),
            sum(before.get((unit, category), 0) for unit in units),
            sum(after.get((unit, category), 0) for unit in units),
        )
        for category, units in by_category.items()
    ]
    return tuple(_until_nearly_all(sorted(grown, key=lambda one: -one.bytes)))


def _is_net(category: str, changes: Mapping[tuple[str, str], int]) -> bool:
    """Whether a category grew altogether, and did not only move from unit to unit."""
    return sum(change for (_, name), change in changes.items() if name == category) > 0


def _until_nearly_all(grown: Sequence[Growth]) -> list[Growth]:
    total, named = sum(one.bytes for one in grown), 0
    kept: list[Growth] = []
    for one in grown:
        if kept and (named >= _NEARLY_ALL * total or one.bytes < _LEAST_SHARE * total):
            break
        kept.append(one)
        named += one.bytes
    return kept


def name_units(units: Sequence[str]) -> str:
    """`layers.3`; `layers.*` for several that differ in a number; else the names."""
    patterns = list(dict.fromkeys(_NUMBER.sub("*", unit) for unit in units))
    if len(units) > 1 and len(patterns) < len(units):
        return ", ".join(patterns)
    return ", ".join(units)
