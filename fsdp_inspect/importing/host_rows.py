"""Convert a trace without kernels (CPU, gloo) to event rows.

With FSDP's ranges, the rows are as in a recorded run: collectives have the time at which the main
thread begins to wait for them. Without the ranges, waits are unknown. The rows are then those of a
kernel trace: operators count as compute, and communication outside them is exposed.
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
from fsdp_inspect.importing.communications import Communications, Issues, gloo_threads
from fsdp_inspect.importing.host_ranges import NOWHERE, HostRanges
from fsdp_inspect.importing.kernel_rows import (
    KernelClass,
    KernelSpans,
    OperatorWork,
    sum_kernels,
    unit_at,
)
from fsdp_inspect.importing.kineto_events import (
    Category,
    EventColumns,
    KinetoTrace,
    join_columns,
)
from fsdp_inspect.importing.names import RunNames
from fsdp_inspect.importing.unit_ranges import RangeKind, UnitRanges, UnitSpans
from fsdp_inspect.importing.windows import PhaseRanges, StepMarks
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Method, Phase, Stream
from fsdp_inspect.trace.intervals import Intervals, paint_innermost
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

Int64Array = NDArray[np.int64]

_COPY_OPERATORS = {
    "fsdp::all_gather_copy_in": EventKind.ALL_GATHER_COPY_IN,
    "fsdp::split_with_sizes_copy": EventKind.ALL_GATHER_COPY_OUT,
    "fsdp::chunk_cat": EventKind.REDUCE_SCATTER_COPY_IN,
}
_NO_COMPUTE = ("c10d::", "_c10d_functional", "autograd::", "gloo:", "record_param_comms")
_FUNCTIONAL_WAIT = "_c10d_functional::wait_tensor"
"""The operator in which a thread waits for a functional collective, as of a `DTensor`."""
_RESULT_COPY = "aten::copy_"
"""The last operator of gloo's reduce-scatter: the waiting thread copies its part of the result."""


def operators_named(trace: KinetoTrace, name: str) -> HostRanges:
    """The operators with exactly this name."""
    operators = trace.events[Category.OPERATOR]
    if name not in trace.names:
        return HostRanges.empty()
    chosen = operators.where(operators.name == trace.names.index(name))
    return HostRanges(chosen.thread, chosen.start_ns, chosen.end_ns)


def place_in_steps(
    rows: EventTable, issue_ns: Int64Array, marks: StepMarks, ranges: UnitRanges
) -> EventTable:
    """The rows that were issued in a step, with its number and the microbatch in it."""
    steps = marks.of_issue(issue_ns)
    number = np.array(marks.number, dtype=np.int64)[np.maximum(steps, 0)]
    microbatch = marks.count_within(
        steps, ranges.num_passes(issue_ns), ranges.num_passes(marks.start_ns)
    )
    columns = {**rows.columns(), "step": number, "microbatch": microbatch}
    return EventTable.from_columns(columns).where(steps >= 0)


def data_rows(phases: PhaseRanges, marks: StepMarks) -> EventTable:
    """The waits for the next batch, on the host."""
    return _host_rows(EventKind.DATA, Phase.DATA, phases.data, marks)


def _host_rows(kind: EventKind, phase: Phase, ranges: HostRanges, marks: StepMarks) -> EventTable:
    steps = marks.of_issue(ranges.start_ns)
    number = np.array(marks.number, dtype=np.int64)[np.maximum(steps, 0)]
    rows = make_rows(
        kind, ranges.start_ns, ranges.end_ns, step=number, phase=phase, stream=Stream.HOST
    )
    return rows.where(steps >= 0)


@dataclass(frozen=True, slots=True)
class HostRows:
    """Build the rows of one rank whose trace has no kernels."""

    trace: KinetoTrace
    comms: Communications
    ranges: UnitRanges
    phases: PhaseRanges
    marks: StepMarks
    names: RunNames

    def make(self, owners: Owners, units: tuple[str, ...]) -> EventTable:
        """Build all rows; rows outside the steps are left out.

        Args:
            owners: The owner of each collective.
            units: The unit names that the indices in `owners` refer to.
        """
        collectives = make_collective_rows(
            self.comms, owners, self._waits(owners), self.phases, self.names, units
        )
        parts = [
            self._in_steps(collectives),
            data_rows(self.phases, self.marks),
            _host_rows(EventKind.OPTIMIZER, Phase.OPTIMIZER, self.phases.optimizer, self.marks),
            self._unit_rows(EventKind.FORWARD, Phase.FORWARD, self.ranges.forwards()),
            self._unit_rows(EventKind.BACKWARD, Phase.BACKWARD, self.ranges.backwards()),
            *(self._copy_rows(name, kind) for name, kind in _COPY_OPERATORS.items()),
            self._steps(),
        ]
        if len(self.ranges) == 0 and len(self.trace.events[Category.OPERATOR]):
            parts += [self._compute_rows(), self._empty_kernels()]
        return EventTable.concat(parts)

    # --- steps

    def _bounds(self) -> tuple[Int64Array, Int64Array]:
        if not self.marks.is_whole_trace:
            return self.marks.start_ns, self.marks.end_ns
        host = [self.trace.events[one] for one in (Category.OPERATOR, Category.ANNOTATION)]
        starts = np.concatenate([one.start_ns for one in host])
        ends = np.concatenate([one.end_ns for one in host])
        return starts.min(keepdims=True), ends.max(keepdims=True)

    def _steps(self) -> EventTable:
        low, high = self._bounds()
        step = np.array(self.marks.number, dtype=np.int64)
        return make_rows(EventKind.STEP, low, high, step=step, stream=Stream.HOST)

    def _empty_kernels(self) -> EventTable:
        """One empty kernel in each step: it marks a kernel trace (`store.reduction.step_parts`)."""
        low, _ = self._bounds()
        step = np.array(self.marks.number, dtype=np.int64)
        return make_rows(EventKind.COMPUTE, low, low, step=step, stream=Stream.HOST)

    def _in_steps(self, rows: EventTable) -> EventTable:
        return place_in_steps(rows, rows.issue_ns, self.marks, self.ranges)

    # --- work of the host

    def _unit_rows(self, kind: EventKind, phase: Phase, spans: UnitSpans) -> EventTable:
        ranges = spans.ranges
        unit = self._in_run(spans.unit)
        rows = make_rows(
            kind,
            ranges.start_ns,
            ranges.end_ns,
            phase=phase,
            unit=unit,
            issued_by=unit,
            stream=Stream.HOST,
        )
        return self._in_steps(rows)

    def _copy_rows(self, name: str, kind: EventKind) -> EventTable:
        ranges = operators_named(self.trace, name)
        around = self.ranges.around(
            ranges.thread,
            ranges.start_ns,
            RangeKind.ALL_GATHER,
            RangeKind.COPY_OUT,
            RangeKind.REDUCE,
        )
        unit = self._in_run(self.ranges.unit_of(around))
        rows = make_rows(
            kind,
            ranges.start_ns,
            ranges.end_ns,
            phase=self.phases.phase_of(ranges.thread, ranges.start_ns),
            unit=unit,
            issued_by=unit,
            stream=Stream.HOST,
        )
        return self._in_steps(rows)

    def _compute_rows(self) -> EventTable:
        """The own work of operators, joined by phase, without that of gloo's threads."""
        work, _ = self._own_work()
        phase = self.phases.phase_of(work.thread, work.start_ns)
        rows = []
        for one in np.unique(phase).tolist():
            spans = Intervals.of(work.start_ns[phase == one], work.end_ns[phase == one])
            rows.append(
                make_rows(
                    EventKind.COMPUTE, spans.starts, spans.ends, phase=one, stream=Stream.HOST
                )
            )
        return self._in_steps(EventTable.concat(rows))

    def _own_work(self) -> tuple[EventColumns, NDArray[np.bool_]]:
        operators = self.trace.events[Category.OPERATOR]
        mine = ~np.isin(operators.thread, gloo_threads(self.trace))
        return _own_pieces(operators.where(mine), self.trace.names)

    def kernels(self, owners: Owners, units: tuple[str, ...]) -> KernelRecord:
        """The operators of the steps by unit, phase and kind; arguments as in `make`."""
        (work, begins), comms = self._own_work(), self.comms
        in_run = np.array([*map(self.names.unit_index, units), NO_UNIT], dtype=np.int64)
        parts = [
            KernelSpans(
                KernelClass.COMPUTE,
                work.name,
                in_run[unit_at(self.ranges, Issues(work.thread, work.start_ns))],
                self.phases.phase_of(work.thread, work.start_ns),
                work.start_ns,
                work.end_ns,
                OperatorWork(
                    np.where(begins, work.flops, 0),
                    np.where(begins, work.moved_bytes, 0),
                    work.moved_bytes > 0,
                ),
                begins,
            ),
            KernelSpans.of_communication(comms, in_run[owners.unit], self.phases),
        ]
        low, high = self._bounds()
        bounds_ns = np.append(low, high[-1:])
        return sum_kernels(parts, self.trace.names, bounds_ns, self.marks, on_device=False)

    def _in_run(self, units: Int64Array) -> Int64Array:
        known = [self.names.unit_index(unit) for unit in self.ranges.units]
        return np.append(known, NO_UNIT).astype(np.int64)[units]

    # --- waits

    def _waits(self, owners: Owners) -> TraceWaits:
        """The wait for a synchronous collective begins at its call, else at the copy-out.

        A collective is synchronous if the range around its call ends after the collective. Outside
        all ranges, it is synchronous if the thread ran no other operator before its end. The wait
        for a functional collective is an operator of its own.
        """
        comms, ranges = self.comms, self.ranges
        around = ranges.around(comms.thread, comms.issue_ns, RangeKind.ALL_GATHER, RangeKind.REDUCE)
        range_end = np.append(ranges.ranges.end_ns, -1)[around]
        blocks_in_range = (around != NOWHERE) & (range_end >= comms.end_ns)
        is_reduction = comms.kind == EventKind.REDUCE_SCATTER
        end_ns = np.where(blocks_in_range & (comms.kind == EventKind.ALL_GATHER), range_end, 0)
        end_ns = np.where(blocks_in_range & is_reduction, self._result_ends(range_end), end_ns)
        blocks = blocks_in_range | ((around == NOWHERE) & self._is_idle_meanwhile())
        began, waited = self._functional_waits(owners)
        end_ns = np.maximum(end_ns, waited)
        later = np.maximum(self._copy_out_starts(owners), began)
        need = np.where(blocks, comms.issue_ns, later)
        method = np.where(blocks, Method.HOST_BLOCKING, Method.MEASURED)
        return TraceWaits(
            need_ns=need,
            start_ns=np.where(blocks, comms.issue_ns, comms.start_ns),
            end_ns=np.maximum(end_ns, comms.end_ns),
            method=method.astype(np.int8),
        )

    def _copy_out_starts(self, owners: Owners) -> Int64Array:
        """The next copy-out of the all-gather's unit, which starts with the wait; -1: none."""
        starts = np.full(len(self.comms), MISSING_INT, dtype=np.int64)
        outs = self.ranges.which(RangeKind.COPY_OUT)
        gathers = (self.comms.kind == EventKind.ALL_GATHER) & (owners.unit != NO_UNIT)
        for unit in np.unique(owners.unit[gathers]).tolist():
            mine = np.flatnonzero(gathers & (owners.unit == unit))
            times = self.ranges.ranges.start_ns[outs[self.ranges.unit[outs] == unit]]
            place = np.searchsorted(times, self.comms.issue_ns[mine])
            known = place < len(times)
            starts[mine[known]] = times[place[known]]
        return starts

    def _functional_waits(self, owners: Owners) -> tuple[Int64Array, Int64Array]:
        """The start and end of the wait in which each collective of no unit ended; -1: none."""
        began = np.full(len(self.comms), MISSING_INT, dtype=np.int64)
        ended = began.copy()
        waits = operators_named(self.trace, _FUNCTIONAL_WAIT)
        foreign = owners.unit == NO_UNIT
        for thread in np.unique(waits.thread).tolist():
            mine = np.flatnonzero(foreign & (self.comms.thread == thread))
            own = waits.where(waits.thread == thread)
            own = own.where(np.argsort(own.start_ns, kind="stable"))
            place = np.searchsorted(own.start_ns, self.comms.end_ns[mine], side="right") - 1
            is_last = own.end_ns[np.maximum(place, 0)] >= self.comms.end_ns[mine]
            is_own = own.start_ns[np.maximum(place, 0)] >= self.comms.issue_ns[mine]
            found = (place >= 0) & is_last & is_own
            began[mine[found]] = own.start_ns[place[found]]
            ended[mine[found]] = own.end_ns[place[found]]
        return began, ended

    def _result_ends(self, limit: Int64Array) -> Int64Array:
        """The end of the waiting thread's first copy after the end of each collective."""
        copies = operators_named(self.trace, _RESULT_COPY)
        found = self.comms.end_ns.copy()
        for thread in np.unique(self.comms.thread).tolist():
            mine = np.flatnonzero(self.comms.thread == thread)
            own = copies.where(copies.thread == thread)
            own = own.where(np.argsort(own.start_ns, kind="stable"))
            place = np.searchsorted(own.start_ns, self.comms.end_ns[mine])
            known = place < len(own)
            ends = own.end_ns[place[known]]
            inside = ends <= limit[mine[known]]
            found[mine[known][inside]] = ends[inside]
        return found

    def _is_idle_meanwhile(self) -> NDArray[np.bool_]:
        """Whether the issuing thread was idle from the end of the call to the collective's end."""
        operators = self.trace.events[Category.OPERATOR]
        idle = np.zeros(len(self.comms), dtype=bool)
        for thread in np.unique(self.comms.thread).tolist():
            mine = np.flatnonzero(self.comms.thread == thread)
            own = operators.where(operators.thread == thread)
            starts = np.sort(own.start_ns)
            calls = np.argsort(own.start_ns, kind="stable")
            call = np.searchsorted(starts, self.comms.issue_ns[mine])
            call_end = own.end_ns[calls[np.minimum(call, len(calls) - 1)]]
            following = np.searchsorted(starts, call_end)
            known = following < len(starts)
            later = starts[np.minimum(following, len(starts) - 1)]
            idle[mine] = ~known | (later >= self.comms.end_ns[mine])
        return idle


def _own_pieces(
    operators: EventColumns, names: tuple[str, ...]
) -> tuple[EventColumns, NDArray[np.bool_]]:
    """The pieces of operators in which no operator inside them runs, by thread and start.

    Only operators that compute: not communication, and not the engine that calls the others. A
    product is not always a leaf: it may copy its bias inside. The mask selects first pieces.
    """
    parts, begins = [], [np.empty(0, dtype=bool)]
    for thread in np.unique(operators.thread).tolist():
        own = operators.where(operators.thread == thread)
        painted = paint_innermost(own.start_ns, own.end_ns, Intervals.of(own.start_ns, own.end_ns))
        _, first = np.unique(painted.span, return_index=True)
        begins.append(np.zeros(len(painted.span), dtype=bool))
        begins[-1][first] = True
        pieces = own.where(painted.span)
        parts.append(replace(pieces, start_ns=painted.starts, end_ns=painted.ends))
    pieces = join_columns(parts)
    computes = np.array(
        ["::" in name and not name.startswith(_NO_COMPUTE) for name in names], dtype=bool
    )
    chosen = computes[pieces.name]
    return pieces.where(chosen), np.concatenate(begins)[chosen]
