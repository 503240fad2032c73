"""Measure what stops the hosts of the ranks, by line: reads of values, collections, ...

Costs are means over all timed and detailed steps of a rank, because a collection or a compilation
happens in few steps. The other ranks wait for a rank that stops, so the cost of a line is that of
the rank with the longest time.

On a CPU a read costs the time of its call. On a device this time is mostly work of the device that
the host waits for, so it is no cost: the device's idle time is (`StepFacts.device_idle_ns`).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fsdp_inspect.analysis.step_selection import select_steps, split_by_rank
from fsdp_inspect.columns import TableSpec, number_column, text_column, unit_column, value_column
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.host_work import (
    COLLECT_CALL,
    COLLECTION,
    DEVICE_ALLOCATION,
    GRAPH_CAPTURE,
    KERNEL_LOADING,
    STOP_NAMES,
    GraphBreak,
    HostActivity,
    HostStop,
)
from fsdp_inspect.trace.run import RunSource

_STOPS = frozenset(STOP_NAMES.values())
"""What is no read of a value."""
_OF_DRIVER = frozenset({GRAPH_CAPTURE, DEVICE_ALLOCATION, KERNEL_LOADING})
"""Work of the driver, which the device may cover; the others stop the host itself."""
ALONE_RATIO = 0.5
"""A line stops one rank alone if the other ranks spend less than this fraction of its time there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStopCost:
    """Calls of one kind at one line, on the rank that spends most time in them."""

    what: str
    place: str
    """The user's line; empty: unknown."""
    phase: str
    fqn: str | None
    """The innermost unit; None: outside all units."""
    rank: int
    count: float
    """Calls per step."""
    duration_ns: int
    """Time inside the calls per step, over all counted steps."""
    num_steps: int
    """Steps with at least one of them."""
    out_of: int
    """All counted steps."""
    idle_ns: int | None
    """Time per step after the calls in which the device has no work; None: unknown."""
    is_alone: bool
    """Whether the other ranks spend much less time there."""
    is_cost: bool
    """Whether the time is lost: on a device, that of reads and of the driver is not, but the idle
    time after it."""
    reason: str
    """Of a compilation: the guard that failed; of a collection: `COLLECT_CALL`, or empty."""
    mean_step_ns: int = 0
    """The mean of the rank's timed steps, of which the cost is a part; 0: unknown. The typical step
    leaves out the steps with a long stop."""


@dataclass(frozen=True, slots=True)
class HostStops(TableResult):
    """What stops the hosts, by line."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "What stops the host, by line",
        (
            text_column("what", "call that reads a value, garbage collection, compilation, ..."),
            text_column("place", "line of the training script", label="line"),
            text_column("phase", "phase of the step"),
            unit_column(
                "innermost FSDP unit",
                lambda row: None if row.fqn is None else format_unit(row.fqn),
            ),
            number_column("rank", "rank that spends most time in these calls"),
            value_column("count", MetricUnit.NUMBER, "calls per step", label="per step"),
            value_column("duration_ns", MetricUnit.NS, "time inside the calls per step",
                         label="time"),
            value_column("idle_ns", MetricUnit.NS,
                         "time after the calls in which the device has no work", label="idle"),
            number_column("num_steps", "steps with at least one of these calls", label="steps"),
        ),
    )  # fmt: skip

    stops: tuple[HostStopCost, ...]
    """The longest first."""
    num_steps: int
    """The counted steps of the rank with most of them."""
    sees_reads: bool
    """Whether reads of values were watched on a rank."""
    graph_breaks: tuple[GraphBreak, ...] = ()
    """Of torch.compile, on any rank."""

    BREAKS: ClassVar[TableSpec] = TableSpec(
        "Graph breaks of torch.compile: Python runs between two graphs",
        (
            text_column("place", "line of the training script", label="line"),
            text_column("reason", "why, as torch says it"),
        ),
    )

    def rows(self) -> Sequence[HostStopCost]:
        """The lines, the longest first."""
        return self.stops

    @property
    def largest(self) -> HostStopCost | None:
        """The line that costs most; None: nothing is known to be lost."""
        return next((stop for stop in self.stops if stop.is_cost), None)

    @property
    def collect_call(self) -> HostStopCost | None:
        """The line of the script that calls `gc.collect()`, with most of the time of collections.

        None if Python collects by itself for longer than the script's calls take.
        """
        collections = (stop for stop in self.stops if stop.what == COLLECTION)
        longest = next(collections, None)
        return longest if longest is not None and longest.reason == COLLECT_CALL else None

    @property
    def reads(self) -> tuple[HostStopCost, ...]:
        """The reads of values, the longest first."""
        return self._by_idle(stop for stop in self.stops if stop.what not in _STOPS)

    @property
    def ratios(self) -> dict[str, float]:
        """The parts of the mean step in which each kind of `STOP_NAMES` stops a host, 0 to 1.

        They are those of the rank with most of the kind, and overlap the parts of the step.
        """
        spent: defaultdict[tuple[str, int], float] = defaultdict(float)
        for stop in self.stops:
            if stop.what in _STOPS and stop.mean_step_ns:
                spent[stop.what, stop.rank] += stop.duration_ns / stop.mean_step_ns
        ratios: dict[str, float] = {}
        for (what, _), ratio in sorted(spent.items(), key=lambda item: -item[1]):
            ratios.setdefault(what, ratio)
        return ratios

    @property
    def driver_calls(self) -> tuple[HostStopCost, ...]:
        """Graph captures, allocations and kernels that the driver loads, the longest first."""
        return self._by_idle(stop for stop in self.stops if stop.what in _OF_DRIVER)

    @staticmethod
    def _by_idle(stops: Iterable[HostStopCost]) -> tuple[HostStopCost, ...]:
        return tuple(sorted(stops, key=lambda stop: -(stop.idle_ns or 0)))


def measure_host_stops(run: RunSource) -> HostStops | None:
    """What stops the hosts of the ranks; None: not recorded."""
    works = {
        record.rank: record.host_work
        for record in run.ranks
        if record.host_work is not None and record.host_work.num_steps
    }
    if not works:
        return None
    units = {unit.index: unit.fqn for unit in run.manifest.units}
    on_device = run.manifest.device_type != "cpu"
    found: dict[tuple[str, str, int, int], dict[int, _Sum]] = defaultdict(dict)
    for rank, work in works.items():
        for stop in work.stops:
            # Python collects wherever memory is allocated, so one line of them says little.
            is_anywhere = stop.what == COLLECTION and stop.reason != COLLECT_CALL
            where = ("", 0, -1) if is_anywhere else (stop.place, stop.phase, stop.unit)
            key = (stop.what, *where)
            found[key].setdefault(rank, _Sum()).add(stop)
    stops = [
        _cost(key, sums, works, units.get(key[3]), on_device=on_device)
        for key, sums in found.items()
    ]
    means = _mean_steps(run, {stop.rank for stop in stops})
    stops = [replace(stop, mean_step_ns=means.get(stop.rank, 0)) for stop in stops]
    return HostStops(
        stops=tuple(sorted(stops, key=lambda stop: -stop.duration_ns)),
        num_steps=max(work.num_steps for work in works.values()),
        sees_reads=any(work.sees_reads for work in works.values()),
        graph_breaks=tuple(
            {
                (each.place, each.reason): each
                for work in works.values()
                for each in work.graph_breaks
            }.values()
        ),
    )


def _mean_steps(run: RunSource, ranks: Collection[int]) -> dict[int, int]:
    """The mean of the timed steps of some ranks."""
    rows = run.summary(ranks=ranks, kinds=[EventKind.STEP])
    timed = rows.where(np.isin(rows.step, select_steps(run).timed))
    return {
        rank: round(float(own.duration_ns.mean())) for rank, own in split_by_rank(timed).items()
    }


@dataclass
class _Sum:
    count: int = 0
    duration_ns: int = 0
    num_steps: int = 0
    longest_ns: int = -1
    idle_ns: int | None = None
    place: str = ""
    reason: str = ""

    def add(self, stop: HostStop) -> None:
        self.count += stop.count
        self.duration_ns += stop.duration_ns
        self.num_steps = max(self.num_steps, stop.num_steps)
        if stop.idle_ns is not None:
            self.idle_ns = (self.idle_ns or 0) + stop.idle_ns
        self.reason = self.reason or stop.reason
        if stop.duration_ns > self.longest_ns:
            self.longest_ns, self.place = stop.duration_ns, stop.place


def _cost(
    key: tuple[str, str, int, int],
    sums: dict[int, _Sum],
    works: dict[int, HostActivity],
    fqn: str | None,
    *,
    on_device: bool,
) -> HostStopCost:
    what, _, phase, _ = key
    steps = {
        rank: max(work.num_steps if what in _STOPS else work.num_read_steps, 1)
        for rank, work in works.items()
    }
    per_step = {
        rank: sums[rank].duration_ns // steps[rank] if rank in sums else 0
        for rank, work in works.items()
    }
    rank = max(per_step, key=lambda each: per_step[each])
    others = [time for each, time in per_step.items() if each != rank]
    own, out_of = sums[rank], steps[rank]
    return HostStopCost(
        what=what,
        place=own.place,
        phase=Phase(phase).label,
        fqn=fqn,
        rank=rank,
        count=own.count / out_of,
        duration_ns=per_step[rank],
        num_steps=min(own.num_steps, out_of),
        out_of=out_of,
        idle_ns=None if own.idle_ns is None else own.idle_ns // out_of,
        is_alone=bool(others) and (median(others) or 0) < ALONE_RATIO * per_step[rank],
        is_cost=what in _STOPS - _OF_DRIVER or not on_device,
        reason=own.reason,
    )
