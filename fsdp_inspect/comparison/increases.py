"""Find increases of memory by category and unit, and of time by part of the step and wait.

Two moments are compared by unit and category, and two steps by part and wait. The largest increases
are named until they cover nearly all of the total. Similar units (`layers.0`, `layers.1`) are named
together.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.analysis.exposed import Exposed
from fsdp_inspect.analysis.memory.peak import PeakMoment
from fsdp_inspect.formatting import format_owner, format_unit
from fsdp_inspect.trace.run import RunSource

_NEARLY_ALL = 0.95
_LEAST_SHARE = 0.05
"""Smaller fractions of the total increase are named only if no increase is larger."""
_BESIDE_THE_LONGEST = 0.25
"""An increase of time is named from this fraction of the largest increase, because times vary."""
_EXPOSED = "exposed_"
"""Prefix of the parts of a step that are waits."""
_NUMBER = re.compile(r"\d+")


NO_UNIT = format_owner(None)
Held = dict[tuple[str, str], int]
"""Bytes at a moment by unit and category, or ns a step by unit and wait."""


@dataclass(frozen=True, slots=True)
class LineBytes:
    """Live storages of a unit and category that one line of the user's code allocated."""

    unit: str
    category: str
    line: str
    """`file:line`."""
    bytes: int
    count: int
    """The number of storages."""


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Live memory at the peak of a phase, or after the step."""

    bytes: int
    unit: str
    """Position: the innermost unit on the host's stack."""
    held: Held
    lines: tuple[LineBytes, ...] = ()
    """The lines that allocated it, the largest first; empty: not recorded. Storages without a known
    line and the smallest storages are missing."""


@dataclass(frozen=True, slots=True)
class Increase:
    """One category of memory that increased in some units, or one part of the step."""

    category: str
    """A category (`activation`), a part of the step (`exposed_all_gather`), or a wait with its
    phase (`all_gather in backward`)."""
    units: tuple[str, ...]
    """Names of the units with the increase; empty for a part of the step."""
    before: int
    """Bytes at the moment, or ns a step, summed over these units."""
    after: int

    @property
    def increase(self) -> int:
        """The increase, bytes or ns."""
        return self.after - self.before

    @property
    def where(self) -> str:
        """The units in short form: `layers.*` for several whose names differ in a number."""
        return abbreviate_units(self.units)


def moment_of(peak: PeakMoment, lines: tuple[LineBytes, ...] = ()) -> MemoryMoment:
    """A moment of a run, with the bytes by unit and category."""
    return MemoryMoment(peak.bytes, format_owner(peak.fqn), _held_at(peak), lines)


def lines_at(run: RunSource, moment: PeakMoment, name: str = "") -> tuple[LineBytes, ...]:
    """The lines that allocated the memory of a moment; empty: not recorded.

    Args:
        run: The run.
        moment: The moment.
        name: Its name in `live_memory.json`; empty: the phase.
    """
    names = {unit.index: format_unit(unit.fqn) for unit in run.manifest.units}
    return tuple(
        LineBytes(names.get(row.unit, NO_UNIT), row.category, row.place, row.bytes, row.count)
        for live in run.live_moments(moment.rank)
        if live.phase == (name or moment.phase) and live.step == moment.step
        for row in live.live
        if row.place
    )


def moved_by(before: MemoryMoment, after: MemoryMoment) -> int | None:
    """The increase of a peak that moved to another unit, bytes; None: it did not move."""
    return after.bytes - before.bytes if after.unit != before.unit else None


def _held_at(peak: PeakMoment) -> Held:
    if not peak.owners:
        return {(NO_UNIT, one.category): one.bytes for one in peak.categories}
    return {
        (format_owner(owner.fqn), one.category): one.bytes
        for owner in peak.owners
        for one in owner.categories
    }


def sum_waits(exposed: Exposed) -> Held:
    """Exposed time by unit, collective and phase, over all dimensions of the mesh."""
    waits: Counter[tuple[str, str]] = Counter()
    for owner in exposed.owners:
        name = format_owner(owner.fqn, owner.is_fsdp)
        waits[name, f"{owner.kind} in {owner.phase}"] += owner.exposed_ns
    return dict(waits)


def find_increases(before: Held, after: Held) -> tuple[Increase, ...]:
    """Increases between two moments, largest first.

    Args:
        before: Bytes by unit and category at the baseline's moment.
        after: Bytes by unit and category at the run's moment.
    """
    grown = [
        _grown(category, units, before, after)
        for category, units in _rises(before, after).items()
        if _is_net(category, before, after)
    ]
    return tuple(_until_nearly_all(sorted(grown, key=lambda one: -one.increase)))


def find_increases_by_unit(before: Held, after: Held) -> tuple[Increase, ...]:
    """All increases between two moments, one for each category and unit, largest first.

    Args:
        before: Bytes by unit and category at the baseline's moment.
        after: Bytes by unit and category at the run's moment.
    """
    grown = [
        _grown(category, [unit], before, after)
        for category, units in _rises(before, after).items()
        if _is_net(category, before, after)
        for unit in units
    ]
    return tuple(sorted(grown, key=lambda one: -one.increase))


def find_longer(
    parts_before: Mapping[str, int],
    parts_after: Mapping[str, int],
    waits_before: Held,
    waits_after: Held,
) -> tuple[Increase, ...]:
    """Increases of a step's parts, then of the waits in them, each longest first.

    Args:
        parts_before: ns by part of the step, in the baseline; empty: compare only waits.
        parts_after: The same in the run.
        waits_before: ns a step by unit and wait, in the baseline.
        waits_after: The same in the run.
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
    """The units in which each category increased."""
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
    """Whether a category increased in total, and did not only move between units."""
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


def in_words_and_numbers(name: str) -> list[tuple[str, int]]:
    """A sort key that puts `layers.2` before `layers.10`."""
    numbers = [int(number) for number in _NUMBER.findall(name)] or [-1]
    return list(zip(_NUMBER.split(name), [*numbers, -1], strict=False))


def abbreviate_units(units: Sequence[str]) -> str:
    """The units in short form: `layers.3`, `layers.*` for three or more, or the names."""
    modules = [name for unit in units for name in unit.split(", ")]
    patterns = list(dict.fromkeys(_NUMBER.sub("*", name) for name in modules))
    if len(modules) > 2 and len(patterns) < len(modules):
        return ", ".join(patterns)
    return ", ".join(modules)


# --- Find the lines of the user's code that allocate the memory that grew.
#
# A baseline has no line numbers, because every edit moves them. It has the bytes that each line
# held, by unit and category. A line whose bytes no line of the baseline had is new or holds another
# amount: these lines account for the whole increase of the unit and category. Of several lines with
# equal bytes, all are given if one of them is new.

_MOST_LINES = 3
"""The highest number of lines for one increase."""
UNKNOWN_LINE = "(unknown line)"


@dataclass(frozen=True, slots=True)
class AllocatingLine:
    """A line of code, with its live storages in one increase of memory."""

    category: str
    units: tuple[str, ...]
    """The units that own storages of the line."""
    line: str
    """`file:line`, followed by the line of the library that it called, if there is one; or
    `UNKNOWN_LINE`."""
    bytes: int
    """Live bytes at the moment."""
    count: int | None
    """The number of storages; None: unknown."""
    is_changed: bool
    """Whether the baseline has no line with these bytes; False also if this is unknown."""

    @property
    def where(self) -> str:
        """The units in short form."""
        return abbreviate_units(self.units)


def find_lines(
    growth: Iterable[Increase], before: MemoryMoment | None, after: MemoryMoment | None
) -> Iterator[AllocatingLine]:
    """Yield the lines of each increase, the largest first.

    Lines with the bytes of a line of the baseline are left out. If only some lines are known, and
    more bytes than in the baseline have none, such as those from earlier steps, a row states them.

    Args:
        growth: The increases at the moment.
        before: The baseline's moment.
        after: The run's moment; None, or without lines: nothing is yielded.
    """
    for grown in growth if after is not None and after.lines else ():
        old, rows = _rows_of(grown, before), _rows_of(grown, after)
        unknown_before, unknown = _unknown(grown, old, before), _unknown(grown, rows, after)
        is_known = before is not None and not (unknown_before or unknown)
        lines: dict[str, list[LineBytes]] = {}
        for row in _changed(old, rows):
            lines.setdefault(row.line, []).append(row)
        summed = [
            _sum(grown.category, line, own, is_changed=is_known) for line, own in lines.items()
        ]
        # A baseline without lines does not show which of its bytes have an unknown line.
        rose = unknown - unknown_before if before is not None and before.lines else unknown
        if rows and rose:
            units = tuple(sorted(rose, key=in_words_and_numbers))
            held = sum(unknown[unit] for unit in units)
            summed.append(AllocatingLine(grown.category, units, UNKNOWN_LINE, held, None, False))
        yield from sorted(summed, key=lambda one: -one.bytes)[:_MOST_LINES]


def _rows_of(grown: Increase, moment: MemoryMoment | None) -> list[LineBytes]:
    if moment is None:
        return []
    return [
        row for row in moment.lines if row.category == grown.category and row.unit in grown.units
    ]


def _changed(old: list[LineBytes], rows: list[LineBytes]) -> list[LineBytes]:
    """The rows with other bytes than in the baseline."""
    known = Counter((row.unit, row.bytes) for row in old)
    found = Counter((row.unit, row.bytes) for row in rows)
    return [row for row in rows if (found - known)[row.unit, row.bytes]]


def _unknown(grown: Increase, rows: list[LineBytes], moment: MemoryMoment | None) -> Counter[str]:
    """Bytes of the category without a line, by unit."""
    held = {} if moment is None else moment.held
    unknown = Counter({unit: held.get((unit, grown.category), 0) for unit in grown.units})
    for row in rows:
        unknown[row.unit] -= row.bytes
    return +unknown


def _sum(category: str, line: str, rows: list[LineBytes], *, is_changed: bool) -> AllocatingLine:
    return AllocatingLine(
        category,
        tuple(sorted({row.unit for row in rows}, key=in_words_and_numbers)),
        line,
        sum(row.bytes for row in rows),
        sum(row.count for row in rows),
        is_changed,
    )


# --- Compare the lines of two runs, whose code may differ.

MOST_CHANGES = 8
"""The highest number of lines in a comparison."""


@dataclass(frozen=True, slots=True)
class LineChange:
    """The live memory that a line allocated, at the peaks of two runs."""

    category: str
    units: tuple[str, ...]
    """The units that own it in either run."""
    line: str
    """`file:line`, in the later run unless only the earlier one has it."""
    values: tuple[int, int]
    """Bytes in each run."""

    @property
    def change(self) -> int:
        """The increase, bytes."""
        return self.values[1] - self.values[0]

    @property
    def where(self) -> str:
        """The units in short form."""
        return abbreviate_units(self.units)


def compare_lines(
    before: Sequence[LineBytes], after: Sequence[LineBytes]
) -> tuple[LineChange, ...]:
    """Compare lines by category; the largest change first, without equal ones.

    An edit moves the lines below it. So these lines of one file correspond, in this order: those
    that allocate the same bytes in the same units, those with the same number, and those that are
    the only ones left in their units. The others are of one run only.
    """
    if not before or not after:
        return ()
    old, new = _by_line(before), _by_line(after)
    changes = []
    for content in (_same_place, _same_bytes, lambda line, held: line, _same_units):
        for first, second in [*_pairs(old, new, content)]:
            changes.append(_change(second, old.pop(first), new.pop(second)))
    changes += [_change(line, held, {}) for line, held in old.items()]
    changes += [_change(line, {}, held) for line, held in new.items()]
    changes = [each for each in changes if each.change]
    return tuple(sorted(changes, key=lambda each: -abs(each.change))[:MOST_CHANGES])


_Line = tuple[str, str]
"""A category and a line."""
_OfUnits = dict[str, int]
"""Bytes by unit."""


def _by_line(rows: Sequence[LineBytes]) -> dict[_Line, _OfUnits]:
    found: dict[_Line, _OfUnits] = {}
    for row in rows:
        held = found.setdefault((row.category, row.line), {})
        held[row.unit] = held.get(row.unit, 0) + row.bytes
    return found


def _pairs(
    old: Mapping[_Line, _OfUnits],
    new: Mapping[_Line, _OfUnits],
    content: Callable[[_Line, _OfUnits], Any],
) -> Iterator[tuple[_Line, _Line]]:
    """Lines with the same content, if both runs have equally many of them, in order."""
    olds, news = _group(old, content), _group(new, content)
    for key, lines in olds.items():
        if len(lines) == len(news.get(key, ())):
            yield from zip(lines, news[key], strict=True)


def _group(
    lines: Mapping[_Line, _OfUnits], content: Callable[[_Line, _OfUnits], Any]
) -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = {}
    for line in sorted(lines, key=lambda line: in_words_and_numbers(line[1])):
        found.setdefault(repr(content(line, lines[line])), []).append(line)
    return found


def _same_place(line: _Line, held: _OfUnits) -> Any:
    return line, sorted(held.items())


def _same_bytes(line: _Line, held: _OfUnits) -> Any:
    return line[0], _NUMBER.sub("", line[1]), sorted(held.items())


def _same_units(line: _Line, held: _OfUnits) -> Any:
    return line[0], _NUMBER.sub("", line[1]), sorted(held)


def _change(line: _Line, before: _OfUnits, after: _OfUnits) -> LineChange:
    units = sorted({*before, *after}, key=in_words_and_numbers)
    return LineChange(line[0], tuple(units), line[1], (sum(before.values()), sum(after.values())))
