"""Convert the events of a rank to slices and arrows.

An event becomes a slice from its start to its end on the track of its stream. FSDP's collectives
are on the track of their kind, also if the host ran them (synchronous gloo). Each collective has a
slice for its issue, and each exposed wait is a slice on the track that waits. Arrows connect the
issue, the collective, and the copy-out or wait that uses its result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from fsdp_inspect.analysis.wait_causes import Cause, Waits, split_waits
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.report.wording import format_kind
from fsdp_inspect.store.reduction.step_parts import exposing, running_communication
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    DTYPES,
    HOST_STOPS,
    NO_UNIT,
    EventFlag,
    EventKind,
    Method,
    NamedCode,
    Phase,
    Source,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.links import bus_bytes_per_s
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

# --- Assign each slice to a track and to a lane of the track.
#
# Perfetto draws one row of slices per thread, and draws nested slices below their parent. Two
# slices that overlap without being nested cannot share a row, so they use different lanes of their
# track. Each lane is a thread, with a number that sorts it.

RANK_PID = 1000
"""Process number of rank 0; the ranks follow."""
ABOUT_PID = 1
"""Process number of the facts about the whole trace."""
_LANES_PER_TRACK = 400
_TRACKS_PER_RANK = 20
TIDS_PER_RANK = _TRACKS_PER_RANK * _LANES_PER_TRACK


class RankTrack(NamedCode):
    """The tracks of a rank, from top to bottom."""

    STEP = 0
    DATA_AND_OPTIMIZER = 1
    HOST_ISSUE = 2
    MAIN_THREAD = 3
    COMPUTE_STREAM = 4
    ALL_GATHER_COPY_IN = 5
    ALL_GATHER = 6
    REDUCE_SCATTER = 7
    ALL_REDUCE = 8
    OTHER_COLLECTIVES = 9
    MEMORY_COPIES = 10
    HOST_STOPS = 11


TRACK_NAMES = {
    RankTrack.STEP: "step",
    RankTrack.DATA_AND_OPTIMIZER: "data, optimizer",
    RankTrack.HOST_ISSUE: "host issue (moments)",
    RankTrack.MAIN_THREAD: "main thread",
    RankTrack.COMPUTE_STREAM: "compute stream",
    RankTrack.ALL_GATHER_COPY_IN: "all-gather copy-in",
    RankTrack.ALL_GATHER: "all-gather",
    RankTrack.REDUCE_SCATTER: "reduce-scatter",
    RankTrack.ALL_REDUCE: "all-reduce",
    RankTrack.OTHER_COLLECTIVES: "other collectives",
    RankTrack.MEMORY_COPIES: "memory copies by the device",
    RankTrack.HOST_STOPS: "host stops (garbage collection, compilation, ...)",
}

NESTED_TRACKS = frozenset(
    {RankTrack.STEP, RankTrack.DATA_AND_OPTIMIZER, RankTrack.MAIN_THREAD, RankTrack.COMPUTE_STREAM}
)
"""Tracks on which slices may be nested: a unit's forward is inside its parent's forward."""


def pid_of(rank: int) -> int:
    """Process number of a rank."""
    return RANK_PID + rank


@dataclass(slots=True)
class _Lane:
    """One row of slices."""

    open_ends: list[int] = field(default_factory=list)
    latest_start: int = -(1 << 62)

    def takes(self, start: int, end: int, *, may_nest: bool) -> bool:
        """Add the slice to this lane if it fits; returns whether it fits."""
        if start < self.latest_start:
            return False
        self.latest_start = start
        while self.open_ends and self.open_ends[-1] <= start:
            self.open_ends.pop()
        if self.open_ends and (not may_nest or end > self.open_ends[-1]):
            return False
        if end > start:
            self.open_ends.append(end)
        return True


class RankLanes:
    """The lanes of one rank; slices are placed in the order of their starts, long ones first."""

    def __init__(self, rank: int) -> None:
        self.pid = pid_of(rank)
        self._lanes: dict[RankTrack, list[_Lane]] = {}

    def place(self, track: RankTrack, start: int, end: int) -> tuple[int, str | None] | None:
        """The thread for a slice, and the thread's name if this is its first slice.

        None if too many slices overlap on the track to be readable.
        """
        lanes = self._lanes.setdefault(track, [])
        may_nest = track in NESTED_TRACKS
        for number, lane in enumerate(lanes):
            if lane.takes(start, end, may_nest=may_nest):
                return self._tid(track, number), None
        number = len(lanes)
        if number == _LANES_PER_TRACK:
            return None
        lanes.append(_Lane())
        lanes[number].takes(start, end, may_nest=may_nest)
        more = f" ({number + 1})" if number else ""
        return self._tid(track, number), TRACK_NAMES[track] + more

    def _tid(self, track: RankTrack, lane: int) -> int:
        # Unique over all processes, and ascending from top to bottom: Perfetto sorts by it.
        return (self.pid * _TRACKS_PER_RANK + track) * _LANES_PER_TRACK + lane


ISSUE_NS = 1000
"""The largest width of an issue in the drawing."""

_WAITS = frozenset(
    {
        EventKind.ALL_GATHER_WAIT,
        EventKind.REDUCE_SCATTER_WAIT,
        EventKind.ALL_REDUCE_WAIT,
        EventKind.OTHER_WAIT,
    }
)
_KIND_TRACKS = {
    EventKind.STEP: RankTrack.STEP,
    EventKind.BETWEEN_STEPS: RankTrack.DATA_AND_OPTIMIZER,
    EventKind.DATA: RankTrack.DATA_AND_OPTIMIZER,
    EventKind.OPTIMIZER: RankTrack.DATA_AND_OPTIMIZER,
    EventKind.MEMORY_COPY: RankTrack.MEMORY_COPIES,
    **dict.fromkeys(HOST_STOPS, RankTrack.HOST_STOPS),
}
_FSDP_TRACKS = {
    EventKind.ALL_GATHER: RankTrack.ALL_GATHER,
    EventKind.REDUCE_SCATTER: RankTrack.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: RankTrack.ALL_REDUCE,
}
_STREAM_TRACKS: Mapping[int, RankTrack] = {
    Stream.HOST: RankTrack.MAIN_THREAD,
    Stream.COMPUTE: RankTrack.COMPUTE_STREAM,
    Stream.ALL_GATHER_COPY_IN: RankTrack.ALL_GATHER_COPY_IN,
    Stream.ALL_GATHER: RankTrack.ALL_GATHER,
    Stream.REDUCE_SCATTER: RankTrack.REDUCE_SCATTER,
    Stream.ALL_REDUCE: RankTrack.ALL_REDUCE,
    Stream.OTHER: RankTrack.OTHER_COLLECTIVES,
}
_KINDS = {kind.value: kind for kind in EventKind}
_PHASES = {phase.value: phase.label for phase in Phase if phase is not Phase.OUTSIDE}
_SOURCES = {source.value: source.label for source in Source}
_METHODS = {method.value: format_kind(method.label) for method in Method}
_FLAGS = tuple(EventFlag)


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice, on its rank's clock."""

    track: RankTrack
    start_ns: int
    end_ns: int
    name: str
    args: Mapping[str, Any]
    event: int
    """Index of its event in the table; -1 for slices without an arrow."""
    depth: int = 0
    """If two slices have the same times, the one with the higher depth is inside the other."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow from an issue to its collective, and on to the use of the result."""

    issue: int
    """Index of the issue in the slices."""
    collective: int
    use: int | None
    """Index of the use in the slices; None if it is not recorded."""


@dataclass(frozen=True, slots=True)
class StepDrawing:
    """The slices of one step of one rank, by start, and its arrows."""

    slices: list[Slice]
    arrows: list[Arrow]


@dataclass(slots=True)
class SliceNamer:
    """Converts the events of one run to slices."""

    manifest: RunManifest
    clock: RankTrack
    """The track that waits: the compute stream, or on CPU the main thread."""
    step_notes: Mapping[int, str]
    """The reason why a step is not timed; timed steps are absent."""
    _fqns: dict[int, str] = field(init=False)
    _groups: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self._fqns = {unit.index: format_unit(unit.fqn) for unit in self.manifest.units}
        self._groups = {
            group.index: f"{group.role} ({len(group.ranks)} ranks)"
            for group in self.manifest.process_groups
        }

    def draw(self, events: EventTable) -> StepDrawing:
        """The slices and arrows of one step's events."""
        waits = _Waits.of(events)
        rates = bus_bytes_per_s(events, self.manifest.process_groups)
        widths = _issue_widths(events)
        between = events.where(events.kind == EventKind.BETWEEN_STEPS)
        between_ns = int((between.end_ns - between.start_ns).sum())
        slices: list[Slice] = []
        for position, row in enumerate(_rows(events)):
            args = self._describe(row)
            if row["kind"] == EventKind.STEP and between_ns:
                args["between_steps_ns"] = between_ns
                args["step_time_ns"] = row["end_ns"] - row["start_ns"] - between_ns
            if row["kind"] in COLLECTIVES:
                rate, wait = rates[position], waits.of_event(position)
                args["bus_bytes_per_s"] = None if np.isnan(rate) else round(float(rate))
                args |= wait.args
                slices.extend(self._exposed(row, wait))
                slices.append(self._issue(position, row, widths[position]))
            slices.append(self._slice(position, row, args))
        slices.sort(key=lambda drawn: (drawn.start_ns, -drawn.end_ns, drawn.depth))
        return StepDrawing(slices, _find_arrows(events, slices))

    def _slice(self, position: int, row: Mapping[str, int], args: dict[str, Any]) -> Slice:
        return Slice(
            track=self._track(row),
            start_ns=row["start_ns"],
            end_ns=max(row["end_ns"], row["start_ns"]),
            name=self._name(row),
            args={key: value for key, value in args.items() if value is not None},
            event=position,
            depth=1 if row["kind"] in _WAITS else 0,
        )

    def _exposed(self, row: Mapping[str, int], wait: "_Wait") -> Iterator[Slice]:
        for start, end in wait.spans:
            yield Slice(
                track=self.clock,
                start_ns=start,
                end_ns=end,
                name=f"exposed {self._name(row)}",
                args=wait.args,
                event=-1,
                depth=2,
            )

    def _issue(self, position: int, row: Mapping[str, int], width_ns: int) -> Slice:
        return Slice(
            track=RankTrack.HOST_ISSUE,
            start_ns=row["issue_ns"],
            end_ns=row["issue_ns"] + width_ns,
            name=f"issue {self._name(row)}",
            args={"issue_to_start_ns": row["start_ns"] - row["issue_ns"]},
            event=position,
        )

    def _track(self, row: Mapping[str, int]) -> RankTrack:
        kind, has_unit = _KINDS.get(row["kind"]), row["unit"] != NO_UNIT
        if kind in _KIND_TRACKS:
            return _KIND_TRACKS[kind]
        if kind in COLLECTIVES:
            return (_FSDP_TRACKS if has_unit else {}).get(kind, RankTrack.OTHER_COLLECTIVES)
        return _STREAM_TRACKS.get(row["stream"], RankTrack.OTHER_COLLECTIVES)

    def _name(self, row: Mapping[str, int]) -> str:
        kind = _KINDS.get(row["kind"])
        if kind is EventKind.STEP:
            note = self.step_notes.get(row["step"])
            return f"step {row['step']}" + (f" ({note})" if note else "")
        if kind is None:
            return f"event of kind {row['kind']}"
        words = kind.label.replace("all_gather", "all-gather").replace("all_reduce", "all-reduce")
        words = words.replace("reduce_scatter", "reduce-scatter").replace("copy_in", "copy-in")
        words = words.replace("copy_out", "copy-out").replace("_", " ")
        unit = self._fqns.get(row["unit"])
        return f"{words} {unit}" if unit is not None else words

    def _describe(self, row: Mapping[str, int]) -> dict[str, Any]:
        """Describe the known properties of an event in words; unknown properties are None."""
        args: dict[str, Any] = {
            "unit": self._fqns.get(row["unit"]),
            "step": row["step"],
            "microbatch": row["microbatch"] or None,
            "phase": None if row["flags"] & EventFlag.CHECKPOINT else _PHASES.get(row["phase"]),
            "source": _SOURCES.get(row["source"]),
            "method": _METHODS.get(row["method"]),
            "flags": _flag_words(row["flags"]),
        }
        if row["issued_by"] not in (row["unit"], NO_UNIT):
            args["issued_by"] = self._fqns.get(row["issued_by"])
        if row["collective"] != MISSING_INT:
            args["collective"] = row["collective"]
        if row["bytes"] != MISSING_INT:
            args["bytes"] = row["bytes"]
            args["dtype"] = DTYPES[row["dtype"]] if 0 < row["dtype"] < len(DTYPES) else None
            args["group"] = self._groups.get(row["group"])
        if row["sequence"] != MISSING_INT:
            args["sequence"] = row["sequence"]
        return args


def clock_track(events: EventTable) -> RankTrack:
    """The track on which a rank's step is split: the compute stream, or on CPU the main thread."""
    on_stream = bool(np.any(events.stream == Stream.COMPUTE))
    return RankTrack.COMPUTE_STREAM if on_stream else RankTrack.MAIN_THREAD


def _issue_widths(events: EventTable) -> dict[int, int]:
    """The width of each collective's issue in the drawing, which ends before the next issue."""
    positions = np.flatnonzero(np.isin(events.kind, list(COLLECTIVES)))
    positions = positions[np.argsort(events.issue_ns[positions], kind="stable")]
    gaps = np.diff(events.issue_ns[positions], append=events.end_ns.max(initial=0))
    return dict(zip(positions.tolist(), np.clip(gaps, 1, ISSUE_NS).tolist(), strict=True))


def _rows(events: EventTable) -> Iterator[dict[str, int]]:
    columns = events.columns()
    lists = [column.tolist() for column in columns.values()]
    for values in zip(*lists, strict=True):
        yield dict(zip(columns, values, strict=True))


@cache
def _flag_words(flags: int) -> str | None:
    named = [flag.name.lower().replace("_", " ") for flag in _FLAGS if flag & flags and flag.name]
    return ", ".join(named) or None


@dataclass(frozen=True, slots=True)
class _Wait:
    """The exposed time of one collective, with its start and cause."""

    args: dict[str, Any]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Waits:
    """The exposed waits of one step."""

    waits: Waits
    order: dict[int, int]
    """Maps the index of a collective in the events to its index in the waits."""
    exposing: Intervals

    @classmethod
    def of(cls, events: EventTable) -> "_Waits":
        positions = np.flatnonzero(np.isin(events.kind, list(COLLECTIVES))).tolist()
        return cls(
            waits=split_waits(events),
            order={position: number for number, position in enumerate(positions)},
            exposing=exposing(events, running_communication(events)),
        )

    def of_event(self, position: int) -> _Wait:
        number = self.order[position]
        exposed = int(self.waits.exposed_ns[number])
        if exposed == 0:
            return _Wait({"exposed_ns": 0}, [])
        by_cause = {
            f"exposed_{cause.label}_ns": duration
            for cause, duration in zip(Cause, self.waits.by_cause_ns[number].tolist(), strict=True)
            if duration
        }
        end = int(self.waits.collectives.end_ns[number])
        spans = self.exposing.clip(int(self.waits.begin_ns[number]), end)
        return _Wait(
            {"exposed_ns": exposed, **by_cause},
            list(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)),
        )


def _find_arrows(events: EventTable, slices: list[Slice]) -> list[Arrow]:
    uses = _find_uses(events)
    issues: dict[int, int] = {}
    drawn: dict[int, int] = {}
    for position, one in enumerate(slices):
        if one.event >= 0:
            (issues if one.track is RankTrack.HOST_ISSUE else drawn)[one.event] = position
    return [
        Arrow(
            issue=issue,
            collective=drawn[event],
            use=drawn[uses[event]] if event in uses else None,
        )
        for event, issue in issues.items()
    ]


def _find_uses(events: EventTable) -> dict[int, int]:
    """Map each collective to the event that uses its result: its copy-out, else its wait."""
    best: dict[int, int] = {}
    takes = np.isin(events.kind, [EventKind.ALL_GATHER_COPY_OUT, *sorted(_WAITS)])
    takes &= (events.collective != MISSING_INT) & (events.end_ns > events.start_ns)
    for position in np.flatnonzero(takes).tolist():
        collective = int(events.collective[position])
        is_copy = events.kind[position] == EventKind.ALL_GATHER_COPY_OUT
        if is_copy or collective not in best:
            best[collective] = position
    travels = np.flatnonzero(np.isin(events.kind, list(COLLECTIVES))).tolist()
    return {
        event: best[int(events.collective[event])]
        for event in travels
        if int(events.collective[event]) in best
    }
