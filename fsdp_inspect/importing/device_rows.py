"""Convert a trace with kernels to event rows.

Compute kernels of one phase and unit are joined if they touch or overlap, because analyses need
only their union. Copies and fills by the device (memcpy, memset) are not compute.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.collective_rows import (
    Owners,
    TraceWaits,
    make_collective_rows,
    make_rows,
)
from fsdp_inspect.importing.communications import (
    Communications,
    Issues,
    describe_kernels,
    find_communication_kernels,
    find_issues,
    with_peer_copies,
)
from fsdp_inspect.importing.host_calls import HostCalls
from fsdp_inspect.importing.host_ranges import NOWHERE, HostRanges
from fsdp_inspect.importing.host_rows import data_rows, operators_named, place_in_steps
from fsdp_inspect.importing.kernel_rows import (
    KernelClass,
    KernelSpans,
    find_work,
    sum_kernels,
    unit_at,
)
from fsdp_inspect.importing.kineto_events import Category, EventColumns, KinetoTrace
from fsdp_inspect.importing.messages import GroupNames
from fsdp_inspect.importing.names import RunNames
from fsdp_inspect.importing.unit_ranges import RangeKind, UnitRanges, UnitSpans
from fsdp_inspect.importing.windows import PhaseRanges, StepMarks, StepWindows
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Method, Phase, Stream
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

Int64Array = NDArray[np.int64]

_COPY_OPERATORS = {
    "fsdp::all_gather_copy_in": EventKind.ALL_GATHER_COPY_IN,
    "fsdp::chunk_cat": EventKind.REDUCE_SCATTER_COPY_IN,
}
_COPY_STREAMS = {EventKind.ALL_GATHER_COPY_IN: Stream.ALL_GATHER_COPY_IN}


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The compute kernels, communication and copies of a rank, each with its issues."""

    comms: Communications
    compute: EventColumns
    compute_issues: Issues
    copies: EventColumns
    copy_issues: Issues

    @classmethod
    def of(cls, trace: KinetoTrace, groups: GroupNames) -> "DeviceWork":
        """Sort the device events of a trace."""
        trace = with_peer_copies(trace)
        kernels, copies = trace.events[Category.KERNEL], trace.events[Category.MEMORY_COPY]
        issues = find_issues(trace, kernels)
        communicates = find_communication_kernels(trace)
        chosen = np.flatnonzero(communicates)
        return cls(
            comms=describe_kernels(trace, chosen, issues.where(chosen), groups),
            compute=kernels.where(~communicates),
            compute_issues=issues.where(~communicates),
            copies=copies,
            copy_issues=find_issues(trace, copies),
        )


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Build the rows of one rank whose trace has kernels."""

    trace: KinetoTrace
    work: DeviceWork
    ranges: UnitRanges
    phases: PhaseRanges
    marks: StepMarks
    names: RunNames
    calls: HostCalls

    @property
    def comms(self) -> Communications:
        """The communication of the rank."""
        return self.work.comms

    def make(self, owners: Owners, units: tuple[str, ...]) -> EventTable:
        """Build all rows; rows outside the steps are left out.

        Args:
            owners: The owner of each collective.
            units: The unit names that the indices in `owners` refer to.
        """
        windows = self._windows()
        comms = self.work.comms
        waits = TraceWaits(
            need_ns=self._needs(owners),
            start_ns=comms.start_ns,
            end_ns=comms.end_ns,
            method=np.full(len(comms), Method.MEASURED, dtype=np.int8),
        )
        collectives = make_collective_rows(comms, owners, waits, self.phases, self.names, units)
        parts = [
            self._in_steps(collectives, comms.issue_ns),
            *self._compute(windows),
            *self._fsdp_copies(windows),
            self._memory_copies(windows),
            self._unit_rows(EventKind.FORWARD, Phase.FORWARD, self.ranges.forwards()),
            self._unit_rows(EventKind.BACKWARD, Phase.BACKWARD, self.ranges.backwards()),
            self._optimizer_rows(),
            data_rows(self.phases, self.marks),
            self._in_steps(self.calls.driver, self.calls.driver.start_ns),
            self._steps(windows),
        ]
        return EventTable.concat(parts)

    def _windows(self) -> StepWindows:
        work = self.work
        issued = np.concatenate(
            [work.comms.issue_ns, work.compute_issues.time_ns, work.copy_issues.time_ns]
        )
        starts = np.concatenate([work.comms.start_ns, work.compute.start_ns, work.copies.start_ns])
        ends = np.concatenate([work.comms.end_ns, work.compute.end_ns, work.copies.end_ns])
        return StepWindows.on_device(self.marks.of_issue(issued), starts, ends)

    def _steps(self, windows: StepWindows) -> EventTable:
        """The steps, each with an empty kernel that marks kernel traces (see `step_parts`)."""
        low, high = windows.bounds_ns[:-1], windows.bounds_ns[1:]
        step = self._numbers(np.arange(len(windows)))
        return EventTable.concat(
            [
                make_rows(EventKind.STEP, low, high, step=step, stream=Stream.COMPUTE),
                make_rows(EventKind.COMPUTE, low, low, step=step, stream=Stream.COMPUTE),
            ]
        )

    def _numbers(self, steps: Int64Array) -> Int64Array:
        return np.array(self.marks.number, dtype=np.int64)[steps]

    def _in_steps(self, rows: EventTable, issue_ns: Int64Array) -> EventTable:
        """The rows that were issued in a step, with its number."""
        return place_in_steps(rows, issue_ns, self.marks, self.ranges)

    def kernels(self, owners: Owners, units: tuple[str, ...]) -> KernelRecord:
        """The kernels of the steps by unit, phase and kind; arguments as in `make`."""
        work = self.work
        in_run = np.array([*map(self.names.unit_index, units), NO_UNIT], dtype=np.int64)

        def spans(kind: KernelClass, events: EventColumns, issues: Issues) -> KernelSpans:
            return KernelSpans(
                kind,
                events.name,
                in_run[unit_at(self.ranges, issues)],
                self.phases.phase_of(issues.thread, issues.time_ns),
                events.start_ns,
                events.end_ns,
            )

        compute = spans(KernelClass.COMPUTE, work.compute, work.compute_issues)
        parts = [
            replace(compute, work=find_work(self.trace, work.compute)),
            KernelSpans.of_communication(work.comms, in_run[owners.unit], self.phases),
            spans(KernelClass.MEMORY_COPY, work.copies, work.copy_issues),
        ]
        return sum_kernels(
            parts, self.trace.names, self._windows().bounds_ns, self.marks, on_device=True
        )

    def _compute(self, windows: StepWindows) -> list[EventTable]:
        issues = self.work.compute_issues
        phase = self.phases.phase_of(issues.thread, issues.time_ns).astype(np.int64)
        unit = unit_at(self.ranges, issues)
        return self._joined(
            windows, self.work.compute, phase, unit, kind=EventKind.COMPUTE, stream=Stream.COMPUTE
        )

    def _fsdp_copies(self, windows: StepWindows) -> list[EventTable]:
        """FSDP's kernels and copies between parameters and communication buffers."""
        work = self.work
        events = _join_columns(work.compute, work.copies)
        issues = Issues(
            np.concatenate([work.compute_issues.thread, work.copy_issues.thread]),
            np.concatenate([work.compute_issues.time_ns, work.copy_issues.time_ns]),
        )
        kind = np.full(len(events), NOWHERE, dtype=np.int64)
        inside = self.ranges.around(issues.thread, issues.time_ns, RangeKind.COPY_OUT)
        kind[inside != NOWHERE] = EventKind.ALL_GATHER_COPY_OUT
        for name, code in _COPY_OPERATORS.items():
            operators = operators_named(self.trace, name)
            kind[operators.covers(issues.thread, issues.time_ns)] = code
        around = self.ranges.around(
            issues.thread,
            issues.time_ns,
            RangeKind.COPY_OUT,
            RangeKind.ALL_GATHER,
            RangeKind.REDUCE,
        )
        rows = []
        for code in np.unique(kind[kind != NOWHERE]).tolist():
            mine = np.flatnonzero(kind == code)
            chosen = issues.where(mine)
            phase = self.phases.phase_of(chosen.thread, chosen.time_ns).astype(np.int64)
            unit = self.ranges.unit_of(around[mine])
            stream = _COPY_STREAMS.get(EventKind(code), Stream.COMPUTE)
            rows += self._joined(
                windows, events.where(mine), phase, unit, kind=EventKind(code), stream=stream
            )
        return rows

    def _memory_copies(self, windows: StepWindows) -> EventTable:
        copies = self.work.copies
        steps, spans = windows.cut(Intervals.of(copies.start_ns, copies.end_ns))
        return make_rows(EventKind.MEMORY_COPY, spans.starts, spans.ends, step=self._numbers(steps))

    def _joined(
        self,
        windows: StepWindows,
        events: EventColumns,
        phase: Int64Array,
        unit: Int64Array,
        *,
        kind: EventKind,
        stream: Stream,
    ) -> list[EventTable]:
        """One row for each interval without a gap, by phase and unit, cut at the steps."""
        rows = []
        keys = phase * (len(self.ranges.units) + 1) + unit + 1
        for key in np.unique(keys).tolist():
            mine = keys == key
            steps, spans = windows.cut(Intervals.of(events.start_ns[mine], events.end_ns[mine]))
            one_phase, one_unit = divmod(key, len(self.ranges.units) + 1)
            index = NO_UNIT if one_unit == 0 else self._unit_index(one_unit - 1)
            rows.append(
                make_rows(
                    kind,
                    spans.starts,
                    spans.ends,
                    step=self._numbers(steps),
                    phase=one_phase,
                    unit=index,
                    issued_by=index,
                    stream=stream,
                )
            )
        return rows

    def _unit_index(self, place: int) -> int:
        return self.names.unit_index(self.ranges.units[place])

    def _unit_rows(self, kind: EventKind, phase: Phase, spans: UnitSpans) -> EventTable:
        """A row for each span: from the first start to the last end of the kernels issued in it."""
        found = _issued_in(spans.ranges, self.work.compute, self.work.compute_issues)
        kept = np.flatnonzero(found.end_ns > found.start_ns)
        unit = np.array([self._unit_index(one) for one in spans.unit[kept].tolist()], np.int64)
        issue_ns = spans.ranges.start_ns[kept]
        rows = make_rows(
            kind,
            found.start_ns[kept],
            found.end_ns[kept],
            phase=phase,
            unit=unit,
            issued_by=unit,
            stream=Stream.COMPUTE,
            method=Method.INFERRED,
            issue_ns=issue_ns,
        )
        return self._in_steps(rows, issue_ns)

    def _optimizer_rows(self) -> EventTable:
        ranges = self.phases.optimizer
        found = _issued_in(ranges, self.work.compute, self.work.compute_issues)
        kept = np.flatnonzero(found.end_ns > found.start_ns)
        rows = make_rows(
            EventKind.OPTIMIZER,
            found.start_ns[kept],
            found.end_ns[kept],
            phase=Phase.OPTIMIZER,
            stream=Stream.COMPUTE,
            method=Method.INFERRED,
            issue_ns=ranges.start_ns[kept],
        )
        return self._in_steps(rows, ranges.start_ns[kept])

    def _needs(self, owners: Owners) -> Int64Array:
        """The time at which the compute stream began to wait for each all-gather; -1 for the rest.

        The wait comes before the copies out of the all-gather's buffer. It begins when the work
        before them on their stream has ended and the host has issued the wait.
        """
        need = np.full(len(self.work.comms), MISSING_INT, dtype=np.int64)
        copy_outs = self.ranges.which(RangeKind.COPY_OUT)
        if len(copy_outs) == 0:
            return need
        work = self.work
        first = _first_issued_in(
            self.ranges.ranges.where(copy_outs), work.compute, work.compute_issues
        )
        before = _ends_before(work.compute, first)
        began = np.maximum(before, self.ranges.ranges.start_ns[copy_outs])
        waits = np.where(first != NOWHERE, began, MISSING_INT)
        gathers = (work.comms.kind == EventKind.ALL_GATHER) & (owners.unit != NO_UNIT)
        for unit in np.unique(owners.unit[gathers]).tolist():
            mine = np.flatnonzero(gathers & (owners.unit == unit))
            outs = np.flatnonzero(self.ranges.unit[copy_outs] == unit)
            starts = self.ranges.ranges.start_ns[copy_outs[outs]]
            place = np.searchsorted(starts, work.comms.issue_ns[mine])
            known = place < len(outs)
            need[mine[known]] = waits[outs[place[known]]]
        return need


@dataclass(frozen=True, slots=True)
class _DeviceSpans:
    """First start and last end of the events issued in each range; 0, 0 without events."""

    start_ns: Int64Array
    end_ns: Int64Array


def _issued_in(ranges: HostRanges, events: EventColumns, issues: Issues) -> _DeviceSpans:
    starts = np.zeros(len(ranges), dtype=np.int64)
    ends = np.zeros(len(ranges), dtype=np.int64)
    for thread in np.unique(ranges.thread).tolist():
        mine = np.flatnonzero(ranges.thread == thread)
        order = np.flatnonzero(issues.thread == thread)
        order = order[np.argsort(issues.time_ns[order], kind="stable")]
        times = issues.time_ns[order]
        lows = np.searchsorted(times, ranges.start_ns[mine])
        highs = np.searchsorted(times, ranges.end_ns[mine])
        any_issued = highs > lows
        mine, lows, highs = mine[any_issued], lows[any_issued], highs[any_issued]
        starts[mine] = _reduce_slices(np.minimum, events.start_ns[order], lows, highs)
        ends[mine] = _reduce_slices(np.maximum, events.end_ns[order], lows, highs)
    return _DeviceSpans(starts, ends)


def _reduce_slices(
    reduction: np.ufunc, values: Int64Array, lows: Int64Array, highs: Int64Array
) -> Int64Array:
    """Reduce each slice `values[low:high]`, none of them empty; shape of `lows`."""
    if len(lows) == 0:
        return lows
    bounds = np.column_stack([lows, highs]).reshape(-1)
    closed = np.append(values, values[-1])  # the last slice may end at the end of the values
    return np.asarray(reduction.reduceat(closed, bounds)[::2], dtype=np.int64)


def _first_issued_in(ranges: HostRanges, events: EventColumns, issues: Issues) -> Int64Array:
    """Index of the first event issued in each range; -1: none."""
    found = np.full(len(ranges), NOWHERE, dtype=np.int64)
    for thread in np.unique(ranges.thread).tolist():
        mine = np.flatnonzero(ranges.thread == thread)
        order = np.flatnonzero(issues.thread == thread)
        order = order[np.argsort(issues.time_ns[order], kind="stable")]
        times = issues.time_ns[order]
        place = np.searchsorted(times, ranges.start_ns[mine])
        inside = place < np.searchsorted(times, ranges.end_ns[mine])
        found[mine[inside]] = order[place[inside]]
    return found


def _ends_before(events: EventColumns, chosen: Int64Array) -> Int64Array:
    """The end of the stream's work before each chosen event; 0 without earlier work, or for -1."""
    ends = np.zeros(len(chosen), dtype=np.int64)
    streams = np.where(chosen == NOWHERE, NOWHERE, events.thread[np.maximum(chosen, 0)])
    for stream in np.unique(streams[streams != NOWHERE]).tolist():
        mine = np.flatnonzero(streams == stream)
        members = np.flatnonzero(events.thread == stream)
        order = members[np.argsort(events.start_ns[members], kind="stable")]
        place = np.searchsorted(events.start_ns[order], events.start_ns[chosen[mine]]) - 1
        reach = np.maximum.accumulate(events.end_ns[order])
        ends[mine] = np.where(place >= 0, reach[np.maximum(place, 0)], 0)
    return ends


def _join_columns(first: EventColumns, second: EventColumns) -> EventColumns:
    return EventColumns(
        *(
            np.concatenate([getattr(first, name), getattr(second, name)])
            for name in EventColumns.__dataclass_fields__
        )
    )
