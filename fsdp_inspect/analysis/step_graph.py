"""Arrange a recorded step of one rank as a graph of compute and collectives.

The *clock* of a rank is its compute stream (CPU: its main thread). Its time without waits for
collectives is cut into pieces, and each piece follows the one before. A piece that begins when a
wait ends also follows the collective.

[Note: release] A collective follows the piece that ends at its release on the clock:

- if the main thread is the clock: its issue;
- FSDP's all-gathers on a stream: the later of the issue and the copy-outs for which it waits;
- FSDP's reduce-scatters on a stream: the end of the backward of the unit, if it is known;
- all others on a stream: their start, because their stream waits for the compute stream.

It also follows the previous collective of its communicator, and HSDP's all-reduce the
reduce-scatter of its unit. The host is not part of the graph. Where a stream waits for the host,
this time is compute.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.wait_causes import Waits, split_waits
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.store.reduction.step_parts import is_kernel_trace
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    NO_UNIT,
    EventFlag,
    EventKind,
    Phase,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals, Painted, paint_innermost
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable, is_any_of

_Int64 = NDArray[np.int64]
_OF_CLOCK = frozenset(
    {EventKind.FORWARD, EventKind.BACKWARD, EventKind.OPTIMIZER, EventKind.DATA, *COPIES}
)
"""The events that name a piece."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A piece of compute, or a collective."""

    event: int
    """Position in `StepGraph.events`: the collective, or the innermost event around the piece."""
    is_collective: bool
    start_ns: int
    """Since the start of the step."""
    duration_ns: int
    """Of a collective: from its turn on the communicator, with the wait for late ranks."""
    after: tuple[int, ...]
    """The nodes that end before it starts, by position in `StepGraph.nodes`."""


@dataclass(frozen=True)
class StepGraph:
    """One step of one rank."""

    rank: int
    step: int
    step_time_ns: int
    events: EventTable
    nodes: tuple[GraphNode, ...]
    """In an order in which each node follows those in `after`."""

    @cached_property
    def replayed_ns(self) -> int:
        """The time of the step if each node begins as soon as the graph allows."""
        ends: list[int] = []
        for node in self.nodes:
            begin = max((ends[number] for number in node.after), default=0)
            ends.append(begin + node.duration_ns)
        return max(ends, default=0)


def measure_step_graph(run: RunSource, rank: int, step: int) -> StepGraph:
    """Arrange one finished step of a rank as a graph.

    Raises:
        MissingDataError: The step has no end, is a plain step, or its waits are unknown.
    """
    events = run.events(rank, steps=[step])
    window = events.where((events.kind == EventKind.STEP) & (events.end_ns > events.start_ns))
    where = f"Step {step} of rank {rank} of run {run.manifest.run_id!r}"
    if len(window) == 0 or np.any(window.flags & EventFlag.PLAIN_STEP):
        why = "is a plain step without units" if len(window) else "has no recorded end"
        raise MissingDataError(
            f"{where} {why}. Expected a finished step with its collectives. Choose another step."
        )
    graph = _Clock.of(events, int(window.start_ns[0]), int(window.end_ns[0]))
    if is_kernel_trace(events) and not graph.is_waited.all():
        raise MissingDataError(
            f"{where} is imported, and {int((~graph.is_waited).sum())} of its collectives do not "
            "say where compute waits for them. Expected a recorded run. Record one with "
            "fsdp_inspect.Recorder."
        )
    return StepGraph(rank, step, graph.step_time_ns, events, tuple(graph.nodes()))


@dataclass(frozen=True, slots=True)
class _Clock:
    """The clock of one step, with its n collectives."""

    events: EventTable
    start_ns: int
    end_ns: int
    idle: Intervals
    """Waits for collectives, and work between steps."""
    positions: _Int64
    """Position of each collective in the events."""
    waits: Waits
    is_waited: NDArray[np.bool_]
    """Whether the clock waits for each collective, or an unused all-gather needs no wait."""
    join_ns: _Int64
    """The time at which the clock goes on after each collective; -1: it does not wait."""
    release_ns: _Int64
    """See [Note: release]."""
    before: list[set[int]]
    """The collectives that each collective follows."""

    @classmethod
    def of(cls, events: EventTable, start_ns: int, end_ns: int) -> "_Clock":
        """Read the clock from the events of a step."""
        trains = events.phase != Phase.EVALUATION
        positions = np.flatnonzero(is_any_of(events.kind, COLLECTIVES) & trains)
        waits = split_waits(events.where(~is_any_of(events.kind, COLLECTIVES) | trains))
        collectives = waits.collectives
        need, end = collectives.need_ns, collectives.end_ns
        since = np.maximum(need, np.minimum(collectives.issue_ns, end))
        is_needed = need >= 0
        between = events.kind == EventKind.BETWEEN_STEPS
        idle = Intervals.of(since[is_needed], end[is_needed])
        idle = idle.union(Intervals.of(events.start_ns[between], events.end_ns[between]))
        on_stream = bool(np.any(events.stream == Stream.COMPUTE))
        release = _release(waits) if on_stream else collectives.issue_ns.copy()
        before = _follow_queues(waits, release, on_stream=on_stream)
        return cls(
            events=events,
            start_ns=start_ns,
            end_ns=end_ns,
            idle=idle.clip(start_ns, end_ns),
            positions=positions,
            waits=waits,
            is_waited=is_needed | ((collectives.flags & EventFlag.UNUSED) != 0),
            join_ns=np.where(is_needed, np.maximum(since, end), -1),
            release_ns=np.clip(release, start_ns, end_ns),
            before=before,
        )

    @property
    def step_time_ns(self) -> int:
        """The step without work between steps."""
        between = self.events.where(self.events.kind == EventKind.BETWEEN_STEPS)
        spans = Intervals.of(between.start_ns, between.end_ns).clip(self.start_ns, self.end_ns)
        return self.end_ns - self.start_ns - spans.duration_ns

    def nodes(self) -> Iterator[GraphNode]:
        """The pieces in the order of time; each collective precedes the piece after its release."""
        named, names = self._names()
        joins, releases = self._by_time(self.join_ns), self._by_time(self.release_ns)
        edges = np.unique([self.start_ns, self.end_ns, *joins, *releases, *named.starts.tolist()])
        edges = edges[(edges >= self.start_ns) & (edges <= self.end_ns)]
        own_ns = np.diff(edges, append=self.end_ns)
        own_ns -= self.idle.covered_ns(edges, np.append(edges[1:], self.end_ns))
        place = np.searchsorted(named.starts, edges, side="right") - 1
        number_of: dict[int, int] = {}
        """The node of each collective."""
        last: tuple[int, ...] = ()
        """The last piece."""
        count = 0
        for begin, duration, at in zip(
            edges.tolist(), own_ns.tolist(), place.tolist(), strict=True
        ):
            joined = {number_of[row] for row in joins[begin] if row in number_of}
            for row in releases[begin]:
                before = {number_of[each] for each in self.before[row] if each in number_of}
                yield self._collective(row, tuple(sorted({*before, *joined, *last})))
                number_of[row], count = count, count + 1
            joined = {number_of[row] for row in joins[begin] if row in number_of}
            if duration or joined:
                after = tuple(sorted({*joined, *last}))
                yield GraphNode(names[at], False, begin - self.start_ns, duration, after)
                last, count = (count,), count + 1

    def _names(self) -> tuple[Painted, list[int]]:
        """The stretches of the clock by their innermost event, and the event of each."""
        events = self.events
        clock = Stream.COMPUTE if np.any(events.stream == Stream.COMPUTE) else Stream.HOST
        mask = is_any_of(events.kind, _OF_CLOCK) & (events.stream == clock)
        rows = np.flatnonzero(mask | (events.kind == EventKind.STEP))
        rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
        within = Intervals.of([self.start_ns], [self.end_ns])
        named = paint_innermost(events.start_ns[rows], events.end_ns[rows], within)
        return named, rows[named.span].tolist()

    def _by_time(self, times_ns: _Int64) -> dict[int, list[int]]:
        """The collectives by time, each list in the order of the communicators; none below 0."""
        found: dict[int, list[int]] = defaultdict(list)
        for row in np.lexsort((self.waits.collectives.end_ns, self.waits.turn_ns)).tolist():
            if times_ns[row] >= 0:
                found[int(times_ns[row])].append(row)
        return found

    def _collective(self, row: int, after: tuple[int, ...]) -> GraphNode:
        begin = int(self.waits.turn_ns[row])
        duration = max(int(self.waits.collectives.end_ns[row]) - begin, 0)
        return GraphNode(int(self.positions[row]), True, begin - self.start_ns, duration, after)


def _release(waits: Waits) -> _Int64:
    """The release of each collective on a stream; see [Note: release]."""
    collectives = waits.collectives
    start, issue, ready = collectives.start_ns, collectives.issue_ns, waits.ready_ns
    by_fsdp = (collectives.unit != NO_UNIT) & (collectives.phase != Phase.OPTIMIZER)
    gathers = by_fsdp & (collectives.kind == EventKind.ALL_GATHER)
    # Where the end of a reduction's gradients is unknown, `ready` is its issue.
    reduces = by_fsdp & (collectives.kind == EventKind.REDUCE_SCATTER) & (ready > issue)
    release = np.where(gathers, np.maximum(ready, issue), np.where(reduces, ready, start))
    bounded: _Int64 = np.minimum(release, start)
    return bounded


def _follow_queues(waits: Waits, release_ns: _Int64, *, on_stream: bool) -> list[set[int]]:
    """The collectives before each one; it is released no earlier than they, in place."""
    collectives = waits.collectives
    before: list[set[int]] = [set() for _ in range(len(collectives))]
    scatters: dict[int, int] = {}
    for row in np.lexsort((collectives.end_ns, waits.turn_ns)).tolist():
        unit, kind = int(collectives.unit[row]), int(collectives.kind[row])
        if waits.ahead[row] >= 0:
            before[row].add(int(waits.ahead[row]))
        if unit != NO_UNIT and kind == EventKind.REDUCE_SCATTER:
            scatters[unit] = row
        elif on_stream and kind == EventKind.ALL_REDUCE and unit in scatters:
            before[row].add(scatters[unit])
            release_ns[row] = release_ns[scatters[unit]]
        for each in before[row]:
            release_ns[row] = max(release_ns[row], release_ns[each])
    return before
