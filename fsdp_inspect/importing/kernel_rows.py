"""Sum the kernels of a trace by step, unit, phase, kind and name.

On a device, each moment of compute belongs to the kernel that began first of those that run then.
So the times of all kernels add up to the union of compute, which the breakdown of a step shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.communications import Communications, Issues
from fsdp_inspect.importing.host_ranges import NOWHERE
from fsdp_inspect.importing.kernel_names import compute_kind_of
from fsdp_inspect.importing.kineto_events import Category, EventColumns, KinetoTrace
from fsdp_inspect.importing.unit_ranges import UnitRanges
from fsdp_inspect.importing.windows import PhaseRanges, StepMarks
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.kernels import (
    KERNEL_KEYS,
    KERNEL_SUMS,
    SMALL_KERNEL_NS,
    KernelColumns,
    KernelKind,
    KernelRecord,
)

Int64Array = NDArray[np.int64]

_FUSABLE = (KernelKind.ELEMENTWISE, KernelKind.NORMALISATION)
_WITH_OPERATIONS = (KernelKind.MATRIX_PRODUCT, KernelKind.ATTENTION)
_WITH_BYTES = (*_FUSABLE, KernelKind.COPY, KernelKind.OTHER)


class KernelClass(IntEnum):
    """Work whose times add up to one union."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY_COPY = 2


@dataclass(frozen=True, slots=True)
class KernelSpans:
    """The kernels of one class; arrays of shape (n,)."""

    kind: KernelClass
    name: NDArray[np.integer]
    """Index into the names of the trace; of communication, its `EventKind`."""
    unit: Int64Array
    phase: NDArray[np.integer]
    start_ns: Int64Array
    end_ns: Int64Array
    work: "OperatorWork | None" = None
    begins: NDArray[np.bool_] | None = None
    """Whether each span is the first piece of its operator; None: spans are whole kernels."""

    @classmethod
    def of_communication(
        cls, comms: Communications, unit: Int64Array, phases: PhaseRanges
    ) -> "KernelSpans":
        """The collectives of a rank; `unit` has the unit of each."""
        return cls(
            KernelClass.COMMUNICATION,
            comms.kind,
            unit,
            phases.phase_of(comms.thread, comms.issue_ns),
            comms.start_ns,
            comms.end_ns,
        )


def unit_at(ranges: UnitRanges, issues: Issues) -> Int64Array:
    """The unit whose backward or forward issued each kernel; -1: none. Shape (n,)."""
    unit = ranges.forwards().unit_around(issues.thread, issues.time_ns)
    in_backward = ranges.backwards().unit_around(issues.thread, issues.time_ns)
    return np.where(in_backward != NO_UNIT, in_backward, unit)


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """What the shapes of operators say of their kernels; arrays of shape (n,)."""

    flops: Int64Array
    moved_bytes: Int64Array
    knows_bytes: NDArray[np.bool_]
    """Kernels of operators whose bytes are known; one of them has all bytes of its operator."""

    @classmethod
    def unknown(cls, count: int) -> "OperatorWork":
        """The work of spans whose operators have no shapes."""
        nothing = np.zeros(count, dtype=np.int64)
        return cls(nothing, nothing, nothing > 0)


def find_work(trace: KinetoTrace, kernels: EventColumns) -> OperatorWork:
    """The operations and bytes of each kernel. Those of an operator belong to its longest one."""
    operators = trace.events[Category.OPERATOR]
    kinds = np.array([compute_kind_of(name) for name in trace.names], dtype=np.int64)
    kind = kinds[kernels.name]
    flops, _ = _give(operators, operators.flops, kernels, np.isin(kind, _WITH_OPERATIONS))
    moved, knows = _give(operators, operators.moved_bytes, kernels, np.isin(kind, _WITH_BYTES))
    return OperatorWork(flops, moved, knows)


def _give(
    operators: EventColumns,
    amounts: Int64Array,
    kernels: EventColumns,
    is_chosen: NDArray[np.bool_],
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Give the amount of each operator to its longest chosen kernel.

    Returns:
        The amounts of the kernels, and a mask of the chosen kernels of operators with an amount.
    """
    given = np.zeros(len(kernels), dtype=np.int64)
    known = np.flatnonzero((amounts > 0) & (operators.external >= 0))
    if len(known) == 0:
        return given, given > 0
    known = known[np.argsort(operators.external[known], kind="stable")]
    ids = operators.external[known]
    place = np.minimum(np.searchsorted(ids, kernels.external), len(ids) - 1)
    is_linked = (ids[place] == kernels.external) & is_chosen
    linked = np.flatnonzero(is_linked)
    longest = linked[np.argsort((kernels.end_ns - kernels.start_ns)[linked], kind="stable")[::-1]]
    _, first = np.unique(place[longest], return_index=True)
    chosen = longest[first]
    given[chosen] = amounts[known[place[chosen]]]
    return given, is_linked


def sum_kernels(
    parts: Sequence[KernelSpans],
    names: tuple[str, ...],
    bounds_ns: Int64Array,
    marks: StepMarks,
    *,
    on_device: bool,
) -> KernelRecord:
    """Sum kernels to the rows of a record.

    Args:
        parts: The kernels, one part for each class.
        names: The names of the trace.
        bounds_ns: Shape (S + 1,): where each step begins, and where the last one ends.
        marks: The steps.
        on_device: Whether they are kernels of a device.
    """
    table = _NameTable(names)
    gaps = _gaps(parts, bounds_ns)
    rows: list[dict[str, Int64Array]] = []
    for part, gap_ns in zip(parts, gaps, strict=True):
        duration_ns = part.end_ns - part.start_ns
        work = part.work or OperatorWork.unknown(len(duration_ns))
        kind, name = table.describe(part)
        phase = part.phase.astype(np.int64)
        keys = {"unit": part.unit, "phase": phase, "kind": kind, "name": name}
        step = _step_of(part.start_ns, bounds_ns)
        inside = np.flatnonzero(step != NOWHERE)
        zero = np.zeros(len(inside), dtype=np.int64)
        is_small = (duration_ns[inside] < SMALL_KERNEL_NS) & (part.begins is None)
        rows.append(
            {
                **{key: values[inside] for key, values in keys.items()},
                "step": step[inside],
                "count": zero + (1 if part.begins is None else part.begins[inside]),
                "num_small": is_small.astype(np.int64),
                "sum_ns": duration_ns[inside],
                "gap_ns": gap_ns[inside],
                "time_ns": zero,
                "flops": work.flops[inside],
                "moved_bytes": work.moved_bytes[inside],
                "moved_ns": zero,
                "fusable_ns": _fusable(part, kind)[inside],
            }
        )
        chosen, step, time_ns = _own_time(part, bounds_ns)
        nothing = np.zeros(len(chosen), dtype=np.int64)
        rows.append(
            {
                **{key: values[chosen] for key, values in keys.items()},
                "step": step,
                **dict.fromkeys(KERNEL_SUMS, nothing),
                "time_ns": time_ns,
                "moved_ns": np.where(work.knows_bytes[chosen], time_ns, 0),
            }
        )
    summed = _summed(
        {key: np.concatenate([row[key] for row in rows]) for key in (*KERNEL_KEYS, *KERNEL_SUMS)}
    )
    number = np.array(marks.number, dtype=np.int64)[: len(bounds_ns) - 1]
    summed["step"] = number[summed["step"]]
    return KernelRecord(
        on_device=on_device,
        steps=number.tolist(),
        step_ns=np.maximum(np.diff(bounds_ns), 0).tolist(),
        names=table.used(summed["name"]),
        columns=KernelColumns(**{key: values.tolist() for key, values in summed.items()}),
    )


class _NameTable:
    """The names of kernels and of kinds of communication in one list."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = (*names, *(EventKind(kind).label for kind in EventKind))
        self._kinds = np.array([compute_kind_of(name) for name in names], dtype=np.int64)
        self._first = len(names)
        self._place = {int(kind): place for place, kind in enumerate(EventKind)}

    def describe(self, part: KernelSpans) -> tuple[Int64Array, Int64Array]:
        """The kind and the number of the name of each kernel."""
        name = part.name.astype(np.int64)
        if part.kind is KernelClass.COMMUNICATION:
            place = [self._first + self._place[one] for one in name.tolist()]
            kind = np.full(len(name), KernelKind.COMMUNICATION, dtype=np.int64)
            return kind, np.array(place, dtype=np.int64)
        if part.kind is KernelClass.MEMORY_COPY:
            return np.full(len(name), KernelKind.MEMORY_COPY, dtype=np.int64), name
        kind = self._kinds[name] if len(name) else name
        of_optimizer = (part.phase == Phase.OPTIMIZER) & (kind != KernelKind.MATRIX_PRODUCT)
        return np.where(of_optimizer, KernelKind.OPTIMIZER, kind), name

    def used(self, numbers: Int64Array) -> list[str]:
        """The names that rows use; `numbers` then refers to this list."""
        distinct, place = np.unique(numbers, return_inverse=True)
        numbers[:] = place
        return [self._names[one] for one in distinct.tolist()]


def _step_of(time_ns: Int64Array, bounds_ns: Int64Array) -> Int64Array:
    """The step that contains each time; -1: none."""
    step = np.searchsorted(bounds_ns, time_ns, side="right") - 1
    return np.where(step < len(bounds_ns) - 1, step, NOWHERE)


def _own_time(
    part: KernelSpans, bounds_ns: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Each kernel's own time in each step: index, step and time. Shape (m,) each."""
    order, start_ns, end_ns = _without_overlaps(part.start_ns, part.end_ns)
    chosen, steps, times = [], [], []
    for step in range(len(bounds_ns) - 1):
        low, high = bounds_ns[step], bounds_ns[step + 1]
        first = int(np.searchsorted(end_ns, low, side="right"))
        last = int(np.searchsorted(start_ns, high))
        begins, ends = start_ns[first:last], end_ns[first:last]
        times.append(np.maximum(np.minimum(ends, high) - np.maximum(begins, low), 0))
        chosen.append(order[first:last])
        steps.append(np.full(len(begins), step, dtype=np.int64))
    if not times:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing
    return np.concatenate(chosen), np.concatenate(steps), np.concatenate(times)


def _without_overlaps(
    start_ns: Int64Array, end_ns: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Give each moment to the span that began first: order, starts and ends, ascending."""
    order = np.lexsort((end_ns, start_ns))
    start_ns, end_ns = start_ns[order], end_ns[order]
    reach = np.maximum.accumulate(end_ns)
    begins = start_ns.copy()
    begins[1:] = np.maximum(start_ns[1:], reach[:-1])
    return order, begins, np.maximum(reach, begins)


def _fusable(part: KernelSpans, kind: Int64Array) -> Int64Array:
    """The time of each elementwise kernel that a fused kernel saves; 0 for the longest of a run.

    A run is a row of such kernels of one unit and phase, without another kernel between them.
    """
    saved = np.zeros(len(kind), dtype=np.int64)
    if part.begins is not None or len(kind) == 0:
        return saved
    order, starts, ends = _without_overlaps(part.start_ns, part.end_ns)
    own_ns = ends - starts
    is_fusable = np.isin(kind[order], _FUSABLE)
    changes = np.ones(len(order), dtype=bool)
    for key in (part.unit[order], part.phase[order], is_fusable):
        changes[1:] &= key[1:] == key[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~changes[1:]]))
    longest = np.repeat(np.maximum.reduceat(own_ns, first), np.diff([*first, len(order)]))
    run = np.repeat(np.arange(len(first)), np.diff([*first, len(order)]))
    _, kept = np.unique(np.where(own_ns == longest, run, -1), return_index=True)
    is_saved = is_fusable.copy()
    is_saved[kept[own_ns[kept] == longest[kept]]] = False
    saved[order] = np.where(is_saved, own_ns, 0)
    return saved


def _gaps(parts: Sequence[KernelSpans], bounds_ns: Int64Array) -> list[Int64Array]:
    """The time before each kernel in which the device runs nothing, within the kernel's step."""
    starts = np.concatenate([part.start_ns for part in parts])
    ends = np.concatenate([part.end_ns for part in parts])
    order = np.lexsort((ends, starts))
    reach = np.maximum.accumulate(ends[order])
    step = _step_of(starts[order], bounds_ns)
    before = np.where(step == NOWHERE, starts[order], bounds_ns[np.maximum(step, 0)])
    before[1:] = np.maximum(before[1:], reach[:-1])
    gap_ns = np.empty(len(starts), dtype=np.int64)
    gap_ns[order] = np.maximum(starts[order] - before, 0)
    bounds = np.cumsum([len(part.start_ns) for part in parts])[:-1]
    return list(np.split(gap_ns, bounds))


def _summed(rows: dict[str, Int64Array]) -> dict[str, Int64Array]:
    """One row for each combination of keys, ascending."""
    if len(rows["step"]) == 0:
        return rows
    keys = np.stack([np.asarray(rows[key], dtype=np.int64) for key in KERNEL_KEYS])
    distinct, place = np.unique(keys, axis=1, return_inverse=True)
    place = place.reshape(-1)
    summed = {key: distinct[number] for number, key in enumerate(KERNEL_KEYS)}
    for key in KERNEL_SUMS:
        total = np.zeros(distinct.shape[1], dtype=np.int64)
        np.add.at(total, place, rows[key])
        summed[key] = total
    return summed
