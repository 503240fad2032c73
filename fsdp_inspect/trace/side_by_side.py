"""Place many steps side by side on one time axis, so that array operations treat them at once.

The analysis of one step takes a few dozen array operations, for any number of events. A thousand
steps, one by one, take a thousand times as many operations. This module shifts each step to its own
place on one axis, where no two steps touch. All steps then form one interval set. Unions,
differences and sweeps give each step the same result as if it were alone.
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
"""Events on one axis. More would only take more memory."""
_MOST_NS = 1 << 61
"""Length of one axis."""
_GAP_NS = 2
"""Gap between two steps: intervals that touch would be joined."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Some steps of one rank on one axis; N events, S steps."""

    positions: _Int64
    """Shape (N,). Index of each event in the given table; sorted by step, otherwise in order."""
    events: EventTable
    """The events in this order, with times on the axis. Missing times stay missing."""
    place: _Int64
    """Shape (N,). Index of the step that an event belongs to, from 0."""
    steps: _Int64
    """Shape (S,). The step numbers, ascending."""
    firsts: _Int64
    """Shape (S,). Index of the first event of each step."""
    begin_ns: _Int64
    """Shape (S,). The earliest time of each step on the axis."""
    shift_ns: _Int64
    """Shape (S,). The shift that was added to the times of each step."""

    def place_of(self, times_ns: _Int64) -> _Int64:
        """Index of the step that contains each time of the axis."""
        place: _Int64 = np.searchsorted(self.begin_ns, times_ns, side="right") - 1
        return place

    def duration_ns(self, spans: Intervals) -> _Int64:
        """The time that the intervals cover in each step, shape (S,)."""
        total = np.zeros(len(self.steps), dtype=np.int64)
        np.add.at(total, self.place_of(spans.starts), spans.ends - spans.starts)
        return total


def lay_side_by_side(events: EventTable) -> Iterator[SideBySide]:
    """Yield all steps of some events of one rank, many steps on each axis.

    Steps with compute kernels and steps without never share an axis, because their parts are
    defined differently (`reduction.step_parts`).

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
    """The first and the last time of each step; `order` puts the events of a step together."""
    need = np.where(events.need_ns >= 0, events.need_ns, events.start_ns)
    lows, highs = [], []
    for column in (events.start_ns, events.end_ns, events.issue_ns, need):
        times = column[order]
        lows.append(np.minimum.reduceat(times, firsts))
        highs.append(np.maximum.reduceat(times, firsts))
    return np.min(lows, axis=0), np.max(highs, axis=0)


def _batches(steps: _Int64, sizes: _Int64, spans_ns: _Int64) -> Iterator[_Int64]:
    """Split the steps into batches that fit on one axis; at least one step in each."""
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
    """The start of each length if they follow each other from 0."""
    starts: _Int64 = np.cumsum(lengths) - lengths
    return starts
