"""What is drawn for one step? Lanes a rank, and the spans on them.

A rank's lanes, from the top: marks where the host issued collectives; its clock, the compute
stream (CPU: the main thread), split exactly as `trace.reduction.split_step` splits the step, so
that what is hatched on it adds up to the step's exposed communication; the collectives, each from
its real start to its real end, in rows where they overlap; and the memory of the step, where it
was sampled.

Times are ns from the start of the earliest rank's step, on the clock of the first rank drawn; a
rank whose clock cannot be aligned begins at 0.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.report import palette
from fsdp_inspect.report.palette import Look
from fsdp_inspect.report.perfetto.axes import place_ranks
from fsdp_inspect.trace.alignment import Alignment, RankClock, align_clocks
from fsdp_inspect.trace.clock_fit import LinearClock
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    NO_UNIT,
    EventFlag,
    EventKind,
    NamedCode,
    Phase,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.painting import paint_innermost, stack_rows
from fsdp_inspect.trace.reduction import (
    EXPOSED_PART_CODES,
    EXPOSED_PARTS,
    StepPart,
    exposed_ns,
    is_kernel_trace,
    split_step,
    waited_since,
)
from fsdp_inspect.trace.run import RankRecord, RunSource
from fsdp_inspect.trace.tables import EventTable, is_any_of
from fsdp_inspect_app.timeline.memory import MemoryCurve, find_sampled_ranks, read_curve

Mask = NDArray[np.bool_]

_RANKS_AT_ONCE = 4
"""Laid out in threads: decoding and sorting leave the interpreter to others."""

_PHASE_OF_COMPUTE = {
    StepPart.FORWARD: Phase.FORWARD,
    StepPart.BACKWARD: Phase.BACKWARD,
    StepPart.OPTIMIZER: Phase.OPTIMIZER,
}
"""Kernel traces: the phase whose kernels are drawn as a part."""


class Track(NamedCode):
    """A lane of a rank, from top to bottom."""

    ISSUE = 0
    """Marks: when the host issued a collective."""
    CLOCK = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_REDUCE = 4
    OTHER_COLLECTIVE = 5
    MEMORY = 6
    """A curve instead of spans."""


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
    palette.ALL_GATHER,
    palette.REDUCE_SCATTER,
    palette.ALL_REDUCE,
    palette.OTHER_COLLECTIVE,
)
"""How spans look; `Spans.look` is a position in it."""

_TRACK_LOOKS = {
    Track.ALL_GATHER: palette.ALL_GATHER,
    Track.REDUCE_SCATTER: palette.REDUCE_SCATTER,
    Track.ALL_REDUCE: palette.ALL_REDUCE,
    Track.OTHER_COLLECTIVE: palette.OTHER_COLLECTIVE,
}
_TRACK_LOOK_INDEX = np.array(
    [LOOKS.index(_TRACK_LOOKS[track]) if track in _TRACK_LOOKS else -1 for track in Track]
)
"""By `Track`: position of its look in `LOOKS`; -1: it has none of its own."""
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


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the drawing."""

    rank: int
    track: Track
    row: int
    """0, or more where collectives of one track overlap in time."""


@dataclass(frozen=True, slots=True)
class Spans:
    """What is drawn, sorted by lane and start; disjoint inside a lane. Arrays of shape (n,)."""

    lane: NDArray[np.int64]
    """Position in the timeline's lanes."""
    look: NDArray[np.int64]
    """Position in `LOOKS`."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    event: NDArray[np.int64]
    """Position in the timeline's events."""

    def __len__(self) -> int:
        return len(self.lane)

    def where(self, mask: NDArray[np.generic] | slice) -> Self:
        """The spans that a mask, an index array or a slice selects."""
        return replace(
            self, **{field.name: getattr(self, field.name)[mask] for field in fields(self)}
        )

    @classmethod
    def concat(cls, members: Sequence[Self]) -> Self:
        """All spans, sorted by lane and start."""
        columns = {
            field.name: np.concatenate([getattr(member, field.name) for member in members])
            for field in fields(cls)
        }
        lane, start = columns["lane"], columns["start_ns"]
        ascends = (np.diff(lane) > 0) | ((np.diff(lane) == 0) & (np.diff(start) >= 0))
        if ascends.all():
            return cls(**columns)
        order = np.lexsort((start, lane))
        return cls(**{name: column[order] for name, column in columns.items()})

    def moved(self, shift_ns: int, first_lane: int, first_event: int) -> Self:
        """The same spans on another clock, among the lanes and events of other ranks."""
        return replace(
            self,
            lane=self.lane + first_lane,
            start_ns=self.start_ns + shift_ns,
            end_ns=self.end_ns + shift_ns,
            event=self.event + first_event,
        )


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
class StepTimeline:
    """One step of some ranks, ready to be drawn."""

    step: int
    lanes: tuple[Lane, ...]
    spans: Spans
    windows: tuple[RankWindow, ...]
    events: EventTable
    """The events behind the spans, each on its own rank's clock."""
    event_rank: NDArray[np.int64]
    """Shape (len(events),)."""
    event_shift_ns: NDArray[np.int64]
    """What to add to an event's times to be on the drawing's axis, shape (len(events),)."""
    exposed_ns: NDArray[np.int64]
    """Exposed time of each event, shape (len(events),)."""
    clock_uncertainty_ns: int
    """By how much lanes of different ranks may be shifted against each other."""
    refusals: Mapping[int, str]
    """By rank, why its clock could not be aligned: its step begins at 0, on an axis of its own."""
    memory: Mapping[int, MemoryCurve]
    """By the position of its lane, on the drawing's axis; empty where the step has no samples."""

    @property
    def timed_spans(self) -> Spans:
        """All but the marks, which last for no time."""
        return self.spans.where(self._is_timed[self.spans.lane])

    @property
    def num_timed_spans(self) -> int:
        """How many they are."""
        return int(np.count_nonzero(self._is_timed[self.spans.lane]))

    @property
    def _is_timed(self) -> Mask:
        return np.array([lane.track is not Track.ISSUE for lane in self.lanes], dtype=bool)

    @property
    def end_ns(self) -> int:
        """The end of the latest rank's step; the axis starts at 0."""
        return max(window.end_ns for window in self.windows)


def build_timeline(run: RunSource, *, step: int, ranks: Collection[int]) -> StepTimeline:
    """Lay out one step of the given ranks.

    Raises:
        IncompleteRunError: None of the ranks finished that step.
    """
    asked = sorted((one for one in run.ranks if one.rank in ranks), key=lambda one: one.rank)
    lay_out = partial(_lay_out_recorded, run, step, find_sampled_ranks(run, step))
    with ThreadPoolExecutor(_RANKS_AT_ONCE) as pool:
        layouts = [layout for layout in pool.map(lay_out, asked) if layout is not None]
    if not layouts:
        raise IncompleteRunError(
            f"No rank of {sorted(ranks)} finished step {step} of run {run.manifest.run_id!r}. "
            "A step is drawn once it has ended. Choose another step or other ranks."
        )
    return _join(step, layouts, align_clocks(run, [layout.window.rank for layout in layouts]))


def draw_events(events: EventTable, *, rank: int, step: int | None = None) -> StepTimeline:
    """Lay out a step of one rank from its events alone, such as those of a prediction.

    Args:
        events: Of one rank.
        rank: Which rank they are said to be of.
        step: The step to draw; None: the last one among the events.

    Raises:
        IncompleteRunError: The events hold no finished step of that number.
    """
    finished = events.step[events.kind == EventKind.STEP]
    chosen = int(finished[-1]) if step is None and len(finished) else step
    own = events.where(events.step == (-1 if chosen is None else chosen))
    if chosen is None or not _has_step(own):
        raise IncompleteRunError(
            f"The events hold no finished step {'' if chosen is None else chosen} to draw. "
            f"Finished: {finished.tolist() or 'none'}. Choose one of them."
        )
    alone = Alignment(rank, {rank: RankClock(LinearClock(), "", 0, 0)}, {})
    return _join(chosen, [_lay_out(rank, own, None)], alone)


def _has_step(events: EventTable) -> bool:
    return bool(np.any(events.kind == EventKind.STEP))


@dataclass(frozen=True, slots=True)
class _RankLayout:
    """One rank's lanes, on its own clock; lanes and events are counted from its first."""

    window: RankWindow
    lanes: tuple[Lane, ...]
    spans: Spans
    events: EventTable
    exposed_ns: NDArray[np.int64]
    memory: MemoryCurve | None
    """Of the last lane."""


def _join(step: int, layouts: Sequence[_RankLayout], alignment: Alignment) -> StepTimeline:
    windows = [member.window for member in layouts]
    starts = {window.rank: window.start_ns for window in windows}
    axes = place_ranks(alignment, starts)
    shifts = [int(axes[rank].move(np.array([start]))[0]) - start for rank, start in starts.items()]
    num_events = [len(member.events) for member in layouts]
    first_lane = np.cumsum([0, *(len(member.lanes) for member in layouts)])
    first_event = np.cumsum([0, *num_events])
    return StepTimeline(
        step=step,
        lanes=tuple(lane for member in layouts for lane in member.lanes),
        spans=Spans.concat(
            [
                member.spans.moved(shift, first_lane[position], first_event[position])
                for position, (member, shift) in enumerate(zip(layouts, shifts, strict=True))
            ]
        ),
        windows=tuple(window.moved(shift) for window, shift in zip(windows, shifts, strict=True)),
        events=EventTable.concat([member.events for member in layouts]),
        event_rank=np.repeat([member.window.rank for member in layouts], num_events),
        event_shift_ns=np.repeat(shifts, num_events),
        exposed_ns=np.concatenate([member.exposed_ns for member in layouts]),
        clock_uncertainty_ns=alignment.uncertainty_ns,
        refusals=dict(alignment.refusals),
        memory={
            int(last) - 1: member.memory.moved(shift)
            for last, member, shift in zip(first_lane[1:], layouts, shifts, strict=True)
            if member.memory is not None
        },
    )


def _lay_out_recorded(
    run: RunSource, step: int, sampled: Collection[int], record: RankRecord
) -> _RankLayout | None:
    """The step of a rank, with its memory if it read that; None if it did not finish it."""
    events = run.events(record.rank, steps=[step])
    if not _has_step(events):
        return None
    return _lay_out(record.rank, events, read_curve(run, record, step, sampled))


def _lay_out(rank: int, events: EventTable, memory: MemoryCurve | None) -> _RankLayout:
    window = _step_window(rank, events)
    parts = split_step(events, window.start_ns, window.end_ns)
    lanes: list[Lane] = []
    spans: list[Spans] = []
    marks = _issue_marks(events, window)
    if len(marks):
        lanes.append(Lane(rank, Track.ISSUE, 0))
        spans.append(marks)
    spans.append(_clock_spans(events, parts).moved(0, len(lanes), 0))
    lanes.append(Lane(rank, Track.CLOCK, 0))
    for track, members in _collective_tracks(events):
        rows = stack_rows(events.start_ns[members], events.end_ns[members])
        spans.append(
            Spans(
                lane=len(lanes) + rows,
                look=_collective_looks(events.kind[members], track),
                start_ns=events.start_ns[members],
                end_ns=events.end_ns[members],
                event=members,
            )
        )
        lanes += [Lane(rank, track, row) for row in range(int(rows.max()) + 1)]
    if memory is not None:
        lanes.append(Lane(rank, Track.MEMORY, 0))
    return _RankLayout(
        window=window,
        lanes=tuple(lanes),
        spans=Spans.concat(spans),
        events=events,
        exposed_ns=exposed_ns(events, parts[StepPart.COMMUNICATION]),
        memory=memory,
    )


def _issue_marks(events: EventTable, window: RankWindow) -> Spans:
    """When the host issued each collective of the step: 1 ns long, moved apart where they meet."""
    issue = events.issue_ns
    members = np.flatnonzero(is_any_of(events.kind, COLLECTIVES) & (issue >= window.start_ns))
    members = members[np.argsort(issue[members], kind="stable")]
    order = np.arange(len(members))
    start = np.maximum.accumulate(issue[members] - order) + order if len(members) else order
    return Spans(
        lane=np.zeros(len(members), dtype=np.int64),
        look=_TRACK_LOOK_INDEX[_track_of(events)[members]],
        start_ns=start,
        end_ns=start + 1,
        event=members,
    )


def _clock_spans(events: EventTable, parts: Mapping[StepPart, Intervals]) -> Spans:
    named = [part for part in palette.PART_LOOKS if part is not StepPart.OTHER]
    return Spans.concat([_part_spans(events, part, parts[part]) for part in named])


def _part_spans(events: EventTable, part: StepPart, within: Intervals) -> Spans:
    claims = np.flatnonzero(_claims(events, part))
    starts = waited_since(events) if part in EXPOSED_PART_CODES else events.start_ns
    painted = paint_innermost(starts[claims], events.end_ns[claims], within)
    return Spans(
        lane=np.zeros(len(painted.span), dtype=np.int64),
        look=np.full(len(painted.span), _look_index(palette.PART_LOOKS[part]), dtype=np.int64),
        start_ns=painted.starts,
        end_ns=painted.ends,
        event=claims[painted.span],
    )


def _claims(events: EventTable, part: StepPart) -> Mask:
    """The events that can be the reason for a part of the step (see `trace.reduction`)."""
    if is_kernel_trace(events) and part in _PHASE_OF_COMPUTE:
        phase = _PHASE_OF_COMPUTE[part]
        return np.asarray((events.kind == EventKind.COMPUTE) & (events.phase == phase), dtype=bool)
    return np.asarray(_claim_mask(events, part), dtype=bool)


def _claim_mask(events: EventTable, part: StepPart) -> Any:
    kind, on_clock = events.kind, is_any_of(events.stream, (Stream.HOST, Stream.COMPUTE))
    again = (events.flags & EventFlag.RECOMPUTE) != 0
    forward = kind == EventKind.FORWARD
    match part:
        case StepPart.FORWARD:
            return forward & ~again
        case StepPart.BACKWARD:
            return is_any_of(kind, (EventKind.BACKWARD, EventKind.RECOMPUTE)) | (forward & again)
        case StepPart.FSDP_COPIES:
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
            return _exposed_claims(events, part)


def _exposed_claims(events: EventTable, part: StepPart) -> Any:
    waited = waited_since(events) < events.end_ns
    own = (events.unit != NO_UNIT) & is_any_of(events.kind, EXPOSED_PARTS)
    if part is StepPart.EXPOSED_OTHER:
        return waited & ~own
    kinds = [kind for kind, exposed_part in EXPOSED_PARTS.items() if exposed_part is part]
    return waited & own & is_any_of(events.kind, kinds)


def _collective_tracks(events: EventTable) -> Iterator[tuple[Track, NDArray[np.int64]]]:
    """The tracks that have something on them, each with the positions of its events."""
    track = _track_of(events)
    for candidate in _TRACK_LOOKS:
        members = np.flatnonzero(track == candidate)
        if len(members):
            yield candidate, members


def _track_of(events: EventTable) -> NDArray[np.int64]:
    """The track of collectives on which each event lies; -1: on none."""
    track = np.full(len(events), -1)
    track[is_any_of(events.kind, COLLECTIVES)] = Track.OTHER_COLLECTIVE
    for kind, own_track in _FSDP_TRACKS.items():
        track[(events.kind == kind) & (events.unit != NO_UNIT)] = own_track
    off_clock = ~is_any_of(events.stream, (Stream.HOST, Stream.COMPUTE))
    for kind, own_track in _STREAM_COPIES.items():
        track[(events.kind == kind) & off_clock] = own_track
    return track


def _collective_looks(kinds: NDArray[np.int8], track: Track) -> NDArray[np.int64]:
    is_copy = is_any_of(kinds, COPIES)
    own, copy = _look_index(_TRACK_LOOKS[track]), _look_index(palette.COPIES)
    return np.where(is_copy, copy, own)


def _look_index(look: Look) -> int:
    return LOOKS.index(look)


def _step_window(rank: int, events: EventTable) -> RankWindow:
    step = np.flatnonzero(events.kind == EventKind.STEP)[0]
    return RankWindow(rank, int(events.start_ns[step]), int(events.end_ns[step]))
