"""How are many steps worked on at once? Laid side by side on one axis of time.

What is asked of the intervals of a step takes a few dozen operations on arrays, whatever the number
of its events; a thousand steps one by one take a thousand times as many. Moved to places on one
axis where no step touches another, they are all one set of intervals: unions, differences and
sweeps over it do to every step what they would do to it alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.tables import EventTable

_Int64 = NDArray[np.int64]

_MOST_EVENTS = 1 << 18
"""Laid side by side at once: more would only take more memory."""
_MOST_NS = 1 << 61
"""Length of an axis."""
_GAP_NS = 2
"""Between two steps: intervals that touch would be one."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Some steps of one rank on one axis; N events, S steps."""

    positions: _Int64
    """Shape (N,). Of the events among those that were given; step after step, else in order."""
    events: EventTable
    """In that order, on the axis. A time that is not known stays so."""
    place: _Int64
    """Shape (N,). Which of the steps an event belongs to, from 0."""
    steps: _Int64
    """Shape (S,). Their numbers, ascending."""
    firsts: _Int64
    """Shape (S,). The first event of each step."""
    begin_ns: _Int64
    """Shape (S,). Where each step begins on the axis: no time of it lies before."""
    shift_ns: _Int64
    """Shape (S,). What was added to its times."""

    def place_of(self, times_ns: _Int64) -> _Int64:
        """The step in which each time of the axis lies."""
        place: _Int64 = np.searchsorted(self.begin_ns, times_ns, side="right") - 1
        return place

    def duration_ns(self, spans: Intervals) -> _Int64:
        """How much of each step the intervals cover, shape (S,)."""
        total = np.zeros(len(self.steps), dtype=np.int64)
        np.add.at(total, self.place_of(spans.starts), spans.ends - spans.starts)
        return total


def lay_side_by_side(events: EventTable) -> Iterator[SideBySide]:
    """All steps of some events of one rank, a good many at a time.

    Steps with the compute kernels of a device and steps without are never on one axis, since they
    are read differently (`reduction.step_parts`).

    Args:
        events: In any order.
    """
    order = np.argsort(events.step, kind="stable")
    if len(order) == 0:
        return
    firsts = np.flatnonzero(np.concatenate([[True], np.diff(events.step[order]) != 0]))
    sizes = np.diff(np.append(firsts, len(order)))
    lows, highs = _reaches(events, order, firsts)
    has_kernels = np.logical_or.reduceat(events.kind[order] == EventKind.COMPUTE, firsts)
    for is_chosen in (~has_kernels, has_kernels):
        for chosen in _batches(np.flatnonzero(is_chosen), sizes, highs - lows):
            rows = np.repeat(firsts[chosen] - _starts(sizes[chosen]), sizes[chosen])
            rows += np.arange(len(rows))
            own = order[rows]
            yield _lay(events.where(own), own, sizes[chosen], lows[chosen], highs[chosen])


def _reaches(events: EventTable, order: _Int64, firsts: _Int64) -> tuple[_Int64, _Int64]:
    """The first and the last time of each step, whose events lie together in that order."""
    need = np.where(events.need_ns >= 0, events.need_ns, events.start_ns)
    lows, highs = [], []
    for column in (events.start_ns, events.end_ns, events.issue_ns, need):
        times = column[order]
        lows.append(np.minimum.reduceat(times, firsts))
        highs.append(np.maximum.reduceat(times, firsts))
    return np.min(lows, axis=0), np.max(highs, axis=0)


def _batches(steps: _Int64, sizes: _Int64, spans_ns: _Int64) -> Iterator[_Int64]:
    """The steps in rows of so many as fit on one axis; at least one."""
    batch: list[int] = []
    num_events = length_ns = 0
    for step in steps.tolist():
        size, span = int(sizes[step]), int(spans_ns[step]) + _GAP_NS
        if batch and (num_events + size > _MOST_EVENTS or length_ns + span > _MOST_NS):
            yield np.array(batch)
            batch, num_events, length_ns = [], 0, 0
        batch.append(step)
        num_events, length_ns = num_events + size, length_ns + span
    if batch:
        yield np.array(batch)


def _lay(
    events: EventTable, positions: _Int64, sizes: _Int64, lows: _Int64, highs: _Int64
) -> SideBySide:
    begin = _starts(highs - lows + _GAP_NS)
    firsts, place = _starts(sizes), np.repeat(np.arange(len(sizes)), sizes)
    shift = begin - lows
    moves = shift[place]
    columns = events.columns()
    for name in ("issue_ns", "start_ns", "end_ns"):
        columns[name] = getattr(events, name) + moves
    columns["need_ns"] = np.where(events.need_ns >= 0, events.need_ns + moves, events.need_ns)
    return SideBySide(
        positions=positions,
        events=EventTable.from_columns(columns),
        place=place,
        steps=events.step[firsts].astype(np.int64),
        firsts=firsts,
        begin_ns=begin,
        shift_ns=shift,
    )


def _starts(lengths: _Int64) -> _Int64:
    """Where each begins if one follows the other from 0."""
    starts: _Int64 = np.cumsum(lengths) - lengths
    return starts
