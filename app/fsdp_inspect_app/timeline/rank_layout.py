"""Lay out the lanes of one rank in one step, and the spans on them.

The lanes of a rank, from the top:

- marks at the times at which the host issued collectives
- the compute stream (CPU: the main thread), split as `reduction.step_parts.split_step` splits the
  step; its hatched parts add up to the exposed communication of the step
- what stops the host (garbage collection, compilation, ...), which overlaps the parts of the step
- the collectives, each from its real start to its real end, in several rows if they overlap
- the memory of the step, if it was sampled

Times are ns on the rank's own clock.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.mesh_dimensions import GroupDimensions
from fsdp_inspect.report import palette
from fsdp_inspect.report.palette import Look
from fsdp_inspect.store.reduction.step_parts import (
    exposed_ns,
    is_kernel_trace,
    split_step,
    waited_since,
)
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    EXPOSED_PART_CODES,
    EXPOSED_PARTS,
    HOST_STOPS,
    NO_UNIT,
    EventFlag,
    EventKind,
    NamedCode,
    Phase,
    StepPart,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals, paint_innermost, stack_rows
from fsdp_inspect.trace.mesh_dimensions import OTHER
from fsdp_inspect.trace.tables import EventTable, is_any_of
from fsdp_inspect_app.timeline.lod import SpanIndex
from fsdp_inspect_app.timeline.memory import MemoryCurve
from fsdp_inspect_app.timeline.spans import Spans

Mask = NDArray[np.bool_]

_PHASE_OF_COMPUTE = {
    StepPart.FORWARD: Phase.FORWARD,
    StepPart.BACKWARD: Phase.BACKWARD,
    StepPart.OPTIMIZER: Phase.OPTIMIZER,
    StepPart.OTHER: Phase.OUTSIDE,
}
"""Kernel traces: the phase whose kernels are drawn as a part."""


class Track(NamedCode):
    """A lane of a rank, from top to bottom."""

    ISSUE = 0
    """The marks of the issues of collectives."""
    CLOCK = 1
    HOST_STOP = 2
    """`HOST_STOPS`."""
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_REDUCE = 5
    OTHER_COLLECTIVE = 6
    MEMORY = 7
    """The lane with a curve instead of spans."""


LOOKS: tuple[Look, ...] = (
    palette.FORWARD,
    palette.BACKWARD,
    palette.OPTIMIZER,
    palette.DATA,
    palette.COPIES,
    palette.EXPOSED_ALL_GATHER,
    palette.EXPOSED_REDUCE_SCATTER,
    palette.EXPOSED_ALL_REDUCE,
    palette.EXPOSED_OTHER,
    palette.HOST_BOUND,
    palette.BETWEEN_STEPS,
    palette.OTHER,
    palette.ALL_GATHER,
    palette.REDUCE_SCATTER,
    palette.ALL_REDUCE,
    palette.OTHER_COLLECTIVE,
    *palette.HOST_STOP_LOOKS.values(),
)
"""The looks of spans; `Spans.look` is an index into it."""

_TRACK_LOOKS = {
    Track.ALL_GATHER: palette.ALL_GATHER,
    Track.REDUCE_SCATTER: palette.REDUCE_SCATTER,
    Track.ALL_REDUCE: palette.ALL_REDUCE,
    Track.OTHER_COLLECTIVE: palette.OTHER_COLLECTIVE,
}
_TRACK_LOOK_INDEX = np.array(
    [LOOKS.index(_TRACK_LOOKS[track]) if track in _TRACK_LOOKS else -1 for track in Track],
    dtype=np.int8,
)
"""The index of each track's look in `LOOKS`; -1: the spans have their own looks."""
_FSDP_TRACKS = {
    EventKind.ALL_GATHER: Track.ALL_GATHER,
    EventKind.REDUCE_SCATTER: Track.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Track.ALL_REDUCE,
}
_STREAM_COPIES = {
    EventKind.ALL_GATHER_COPY_IN: Track.ALL_GATHER,
    EventKind.ALL_GATHER_COPY_OUT: Track.ALL_GATHER,
    EventKind.REDUCE_SCATTER_COPY_IN: Track.REDUCE_SCATTER,
}
_WAITS = (
    EventKind.ALL_GATHER_WAIT,
    EventKind.REDUCE_SCATTER_WAIT,
    EventKind.ALL_REDUCE_WAIT,
    EventKind.OTHER_WAIT,
)
_NO_SPANS = Spans(
    lane=np.empty(0, dtype=np.int32),
    look=np.empty(0, dtype=np.int8),
    start_ns=np.empty(0, dtype=np.int64),
    end_ns=np.empty(0, dtype=np.int64),
    event=np.empty(0, dtype=np.int32),
)


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the drawing."""

    rank: int
    track: Track
    row: int
    """0, or more for overlapping collectives of one track."""
    dimension: str = ""
    """For collectives without a unit, the dimension of the mesh (`tp`); empty: unknown."""


@dataclass(frozen=True, slots=True)
class RankWindow:
    """The step of one rank."""

    rank: int
    start_ns: int
    end_ns: int

    def moved(self, shift_ns: int) -> "RankWindow":
        """The same window on another clock."""
        return RankWindow(self.rank, self.start_ns + shift_ns, self.end_ns + shift_ns)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The drawing of one rank; its lanes and events are numbered from its first."""

    window: RankWindow
    lanes: tuple[Lane, ...]
    index: SpanIndex
    events: EventTable
    """All events of the step."""
    exposed_ns: NDArray[np.int64]
    """Exposed time of each event, shape (len(events),)."""
    memory: MemoryCurve | None
    """The curve of the last lane; None: there is no such lane."""

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return self.window.rank

    @property
    def num_bytes(self) -> int:
        """The memory of the layout."""
        return self.events.num_bytes + self.exposed_ns.nbytes + self.index.num_bytes

    @property
    def timed_spans(self) -> Spans:
        """All spans except the marks, which have no duration."""
        return self.index.spans.where(slice(self._num_marks, None))

    @property
    def num_timed_spans(self) -> int:
        """The number of timed spans."""
        return len(self.index) - self._num_marks

    @property
    def _num_marks(self) -> int:
        """The number of marks, which are the first spans, on the first lane."""
        if self.lanes[0].track is not Track.ISSUE:
            return 0
        _, _, num_marks = self.index.lanes[0]
        return num_marks


def lay_out_rank(
    rank: int,
    events: EventTable,
    memory: MemoryCurve | None,
    dimensions: GroupDimensions | None = None,
    *,
    is_narrow: bool = False,
) -> RankLayout:
    """Lay out a step of one rank.

    Args:
        rank: The number of the rank.
        events: The events of the step by start, with its STEP event.
        memory: The memory of the step, if it was sampled.
        dimensions: The dimensions of the rank's process groups; None: unknown.
        is_narrow: Only the lane that adds up to the step, so that many ranks fit.
    """
    window = _step_window(rank, events)
    parts = split_step(events, window.start_ns, window.end_ns)
    track_of = _track_of(events)
    lanes: list[Lane] = []
    spans: list[Spans] = []
    marks = _NO_SPANS if is_narrow else _issue_marks(events, window, track_of)
    if len(marks):
        lanes.append(Lane(rank, Track.ISSUE, 0))
        spans.append(marks)
    spans.append(_clock_spans(events, parts, lane=len(lanes)))
    lanes.append(Lane(rank, Track.CLOCK, 0))
    tracks = () if is_narrow else _collective_tracks(events, track_of, dimensions)
    for track, dimension, members in tracks:
        rows = stack_rows(events.start_ns[members], events.end_ns[members])
        spans.append(_collective_spans(events, track, members, len(lanes) + rows))
        lanes += [Lane(rank, track, row, dimension) for row in range(int(rows.max()) + 1)]
    if memory is not None:
        lanes.append(Lane(rank, Track.MEMORY, 0))
    return RankLayout(
        window=window,
        lanes=tuple(lanes),
        index=SpanIndex(Spans.concat(spans)),
        events=events,
        exposed_ns=exposed_ns(events, parts[StepPart.COMMUNICATION]),
        memory=memory,
    )


def _issue_marks(events: EventTable, window: RankWindow, track_of: NDArray[np.int8]) -> Spans:
    """The issues of collectives as marks of 1 ns, moved apart if they overlap."""
    issue = events.issue_ns
    members = np.flatnonzero(is_any_of(events.kind, COLLECTIVES) & (issue >= window.start_ns))
    members = members[np.argsort(issue[members], kind="stable")]
    order = np.arange(len(members))
    start = np.maximum.accumulate(issue[members] - order) + order if len(members) else order
    return Spans(
        lane=np.zeros(len(members), dtype=np.int32),
        look=_TRACK_LOOK_INDEX[track_of[members]],
        start_ns=start,
        end_ns=start + 1,
        event=members.astype(np.int32),
    )


def _clock_spans(events: EventTable, parts: Mapping[StepPart, Intervals], *, lane: int) -> Spans:
    claims = _Claims(events)
    # In a kernel trace, compute of an unknown phase is in the part OTHER.
    named = [
        part for part in palette.PART_LOOKS if part is not StepPart.OTHER or is_kernel_trace(events)
    ]
    painted = [_part_spans(claims, part, parts[part], lane) for part in named if len(parts[part])]
    return Spans.concat([_NO_SPANS, *painted]).by_start()


def _part_spans(claims: "_Claims", part: StepPart, within: Intervals, lane: int) -> Spans:
    events, claimed = claims.events, np.flatnonzero(claims.of(part))
    starts = claims.waited_since if part in EXPOSED_PART_CODES else events.start_ns
    painted = paint_innermost(starts[claimed], events.end_ns[claimed], within)
    return Spans(
        lane=np.full(len(painted.span), lane, dtype=np.int32),
        look=np.full(len(painted.span), _look_index(palette.PART_LOOKS[part]), dtype=np.int8),
        start_ns=painted.starts,
        end_ns=painted.ends,
        event=claimed[painted.span].astype(np.int32),
    )


class _Claims:
    """The events that can explain a part of the step (see `reduction.step_parts`)."""

    def __init__(self, events: EventTable) -> None:
        self.events = events
        self.waited_since = waited_since(events)
        self._is_kernel_trace = is_kernel_trace(events)

    def of(self, part: StepPart) -> Mask:
        """The mask of a part's events, shape (n,)."""
        kind = self.events.kind
        if self._is_kernel_trace and part in _PHASE_OF_COMPUTE:
            phase = _PHASE_OF_COMPUTE[part]
            return np.asarray((kind == EventKind.COMPUTE) & (self.events.phase == phase))
        return np.asarray(self._of_host(part), dtype=bool)

    def _of_host(self, part: StepPart) -> Any:
        events, kind = self.events, self.events.kind
        match part:
            case StepPart.FORWARD:
                return (kind == EventKind.FORWARD) & ~self._again
            case StepPart.BACKWARD:
                backward = is_any_of(kind, (EventKind.BACKWARD, EventKind.RECOMPUTE))
                return backward | ((kind == EventKind.FORWARD) & self._again)
            case StepPart.FSDP_COPIES:
                on_clock = is_any_of(events.stream, (Stream.HOST, Stream.COMPUTE))
                return is_any_of(kind, COPIES) & on_clock
            case StepPart.HOST_BOUND:
                return is_any_of(kind, _WAITS) & (events.stream == Stream.COMPUTE)
            case StepPart.OPTIMIZER:
                return kind == EventKind.OPTIMIZER
            case StepPart.DATA:
                return kind == EventKind.DATA
            case StepPart.BETWEEN_STEPS:
                return kind == EventKind.BETWEEN_STEPS
            case _:
                return self._of_exposed(part)

    @property
    def _again(self) -> Any:
        return (self.events.flags & EventFlag.RECOMPUTE) != 0

    def _of_exposed(self, part: StepPart) -> Any:
        events = self.events
        waited = self.waited_since < events.end_ns
        own = (events.unit != NO_UNIT) & is_any_of(events.kind, EXPOSED_PARTS)
        if part is StepPart.EXPOSED_OTHER:
            return waited & ~own
        kinds = [kind for kind, exposed_part in EXPOSED_PARTS.items() if exposed_part is part]
        return waited & own & is_any_of(events.kind, kinds)


def _collective_tracks(
    events: EventTable, track_of: NDArray[np.int8], dimensions: GroupDimensions | None
) -> Iterator[tuple[Track, str, NDArray[np.int64]]]:
    """The tracks below the clock that have events, each with the indices of its events.

    Collectives that FSDP did not issue have a track for each dimension of the mesh.
    """
    for candidate in (Track.HOST_STOP, *_TRACK_LOOKS):
        members = np.flatnonzero(track_of == candidate)
        if len(members) == 0:
            continue
        if candidate is not Track.OTHER_COLLECTIVE or dimensions is None:
            yield candidate, "", members
            continue
        for label, own in dimensions.by_label(events.group[members]).items():
            yield candidate, "" if label == OTHER else label, members[own]


def _collective_spans(
    events: EventTable, track: Track, members: NDArray[np.int64], lanes: NDArray[np.int64]
) -> Spans:
    """The collectives of a track, each on its lane."""
    spans = Spans(
        lane=lanes.astype(np.int32),
        look=_looks_of(events.kind[members], track),
        start_ns=events.start_ns[members],
        end_ns=events.end_ns[members],
        event=members.astype(np.int32),
    )
    if lanes.max() == lanes.min():
        return spans.by_start()
    return spans.where(np.lexsort((spans.start_ns, spans.lane)))


def _track_of(events: EventTable) -> NDArray[np.int8]:
    """The track of each event, if it is a collective or a stop of the host; -1: none."""
    track = np.full(len(events), -1, dtype=np.int8)
    track[is_any_of(events.kind, HOST_STOPS)] = Track.HOST_STOP
    track[is_any_of(events.kind, COLLECTIVES)] = Track.OTHER_COLLECTIVE
    of_unit = events.unit != NO_UNIT
    for kind, own_track in _FSDP_TRACKS.items():
        track[(events.kind == kind) & of_unit] = own_track
    off_clock = ~is_any_of(events.stream, (Stream.HOST, Stream.COMPUTE))
    for kind, own_track in _STREAM_COPIES.items():
        track[(events.kind == kind) & off_clock] = own_track
    return track


def _looks_of(kinds: NDArray[np.int8], track: Track) -> NDArray[np.int8]:
    if track is Track.HOST_STOP:
        stops = {int(kind): _look_index(look) for kind, look in palette.HOST_STOP_LOOKS.items()}
        return np.array([stops[kind] for kind in kinds.tolist()], dtype=np.int8)
    own, copy = _look_index(_TRACK_LOOKS[track]), _look_index(palette.COPIES)
    return np.where(is_any_of(kinds, COPIES), np.int8(copy), np.int8(own))


def _look_index(look: Look) -> int:
    return LOOKS.index(look)


def _step_window(rank: int, events: EventTable) -> RankWindow:
    step = np.flatnonzero(events.kind == EventKind.STEP)[0]
    return RankWindow(rank, int(events.start_ns[step]), int(events.end_ns[step]))
