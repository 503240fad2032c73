"""Find the lines of the user's code that allocate what grew.

A baseline has no line numbers, because every edit moves them. It has the bytes that each line held,
by unit and category. A line whose bytes no line of the baseline had is new or holds another amount:
these lines account for the whole increase of the unit and category. Of several lines with equal
bytes, all are given if one of them is new.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdp_inspect.checks.increases import Increase, abbreviate_units
from fsdp_inspect.checks.measurements import LineBytes, MemoryMoment
from fsdp_inspect.checks.unit_rows import in_words_and_numbers

_MOST_LINES = 3
"""Of one increase."""


@dataclass(frozen=True, slots=True)
class AllocatingLine:
    """A line of code, and its storages in what grew, at the same moment."""

    category: str
    units: tuple[str, ...]
    """Those that hold storages of the line."""
    line: str
    """`file:line`; with the library's line that it called, if there is one."""
    bytes: int
    """Alive at the moment."""
    count: int
    """The number of storages."""
    is_changed: bool
    """Whether no line of the baseline had these bytes; False also if the baseline does not know."""

    @property
    def where(self) -> str:
        """The units in short form."""
        return abbreviate_units(self.units)


def find_lines(
    growth: Iterable[Increase], before: MemoryMoment | None, after: MemoryMoment | None
) -> Iterator[AllocatingLine]:
    """Yield the lines of each increase, the largest first.

    If the baseline knows which lines changed, only these are given.

    Args:
        growth: What grew at the moment.
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
    """The rows with other bytes than in the baseline; empty if a side does not know all lines."""
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
