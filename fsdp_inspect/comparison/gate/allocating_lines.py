"""Find the lines of the user's code that allocate the memory that grew.

A baseline has no line numbers, because every edit moves them. It has the bytes that each line held,
by unit and category. A line whose bytes no line of the baseline had is new or holds another amount:
these lines account for the whole increase of the unit and category. Of several lines with equal
bytes, all are given if one of them is new.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdp_inspect.comparison.gate.increases import Increase, abbreviate_units
from fsdp_inspect.comparison.gate.measurements import LineBytes, MemoryMoment
from fsdp_inspect.comparison.gate.unit_rows import in_words_and_numbers

_MOST_LINES = 3
"""The highest number of lines for one increase."""


@dataclass(frozen=True, slots=True)
class AllocatingLine:
    """A line of code, with its live storages in one increase of memory."""

    category: str
    units: tuple[str, ...]
    """The units that own storages of the line."""
    line: str
    """`file:line`, followed by the line of the library that it called, if there is one."""
    bytes: int
    """Live bytes at the moment."""
    count: int
    """The number of storages."""
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

    If the changed lines are known, only these are yielded.

    Args:
        growth: The increases at the moment.
        before: The baseline's moment.
        after: The run's moment; None, or without lines: nothing is yielded.
    """
    for grown in growth if after is not None else ():
        rows = _rows_of(grown, after)
        changed = _changed(grown, rows, before, after)
        lines: dict[str, list[LineBytes]] = {}
        for row in changed or rows:
            lines.setdefault(row.line, []).append(row)
        summed = [
            _sum(grown.category, line, own, is_changed=bool(changed)) for line, own in lines.items()
        ]
        yield from sorted(summed, key=lambda one: -one.bytes)[:_MOST_LINES]


def _rows_of(grown: Increase, moment: MemoryMoment | None) -> list[LineBytes]:
    if moment is None:
        return []
    return [
        row for row in moment.lines if row.category == grown.category and row.unit in grown.units
    ]


def _changed(
    grown: Increase,
    rows: list[LineBytes],
    before: MemoryMoment | None,
    after: MemoryMoment | None,
) -> list[LineBytes]:
    """The rows with other bytes than in the baseline; empty if a side lacks lines."""
    old = _rows_of(grown, before)
    if not (_is_complete(grown, old, before) and _is_complete(grown, rows, after)):
        return []
    known = Counter((row.unit, row.bytes) for row in old)
    found = Counter((row.unit, row.bytes) for row in rows)
    return [row for row in rows if (found - known)[row.unit, row.bytes]]


def _is_complete(grown: Increase, rows: list[LineBytes], moment: MemoryMoment | None) -> bool:
    """Whether the lines hold all bytes of the category, in each unit."""
    held = {} if moment is None else moment.held
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.unit] += row.bytes
    return moment is not None and all(
        totals[unit] == held.get((unit, grown.category), 0) for unit in grown.units
    )


def _sum(category: str, line: str, rows: list[LineBytes], *, is_changed: bool) -> AllocatingLine:
    return AllocatingLine(
        category,
        tuple(sorted({row.unit for row in rows}, key=in_words_and_numbers)),
        line,
        sum(row.bytes for row in rows),
        sum(row.count for row in rows),
        is_changed,
    )
