"""Measure the kernels of profiled steps by unit, phase and kind, and their share of the peak.

The kernels are those of an imported trace, or of the steps that the recorder profiled
(`profile_steps`). On a CPU, operators that contain no other operator take their place.

Each moment of compute belongs to the kernel that began first of those that run then. So the times
of all kinds of compute add up to the union of compute. The rest of a step is communication without
compute, copies, and gaps in which the device runs nothing. The profiler slows the host, so gaps are
longer than in timed steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.step_selection import timed_ranks
from fsdp_inspect.columns import (
    TableSpec,
    number_column,
    text_column,
    unit_column,
    value_column,
)
from fsdp_inspect.errors import ImportingError, MissingDataError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.hardware import find_gpu
from fsdp_inspect.importing.rank_trace import read_profile
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.trace.kernels import KERNEL_SUMS, KernelKind, KernelRecord
from fsdp_inspect.trace.run import RunSource

_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Kernels of one unit, phase and kind, or of one name; all numbers are per step."""

    fqn: str | None
    """The unit's name, empty for the root; None: outside all units, or of several."""
    phase: str
    kind: str
    """The label of a `KernelKind`."""
    name: str
    """The kernel or operator; empty: of several names."""
    count: float
    small_ratio: float | None
    """Fraction of the kernels that run for less than 6 µs, which a host needs to launch one; None
    on a CPU."""
    sum_ns: int
    time_ns: int
    gap_ns: int
    """Time before these kernels in which the device runs nothing."""
    flops: int | None
    """None: the trace has no shapes of these kernels."""
    fusable_ns: int
    """Time that fused kernels save at most: runs of elementwise kernels without their longest."""
    compute_ratio: float | None
    """Time / compute of the step; None for communication and memory copies."""
    peak_ratio: float | None
    """Operations / time / peak of the device; None if one of them is unknown."""
    moved_bytes: int | None
    """Bytes that the kernels of known shapes read and write at least; None: no kernel has them."""
    bandwidth_ratio: float | None
    """These bytes / time of these kernels / memory bandwidth of the device; None: unknown."""


_COUNTS = (
    number_column("count", "kernels (CPU: operators) per step", lambda row: round(row.count)),
    value_column(
        "small_ratio",
        MetricUnit.RATIO,
        "fraction of the kernels that run for less than 6 µs, which a host needs to launch one",
        label="small",
    ),
    value_column(
        "time_ns",
        MetricUnit.NS,
        "time per step; of kernels that run at once, the first one counts",
        label="time",
    ),
    value_column(
        "compute_ratio", MetricUnit.RATIO, "time / compute of the step", label="of compute"
    ),
    value_column(
        "gap_ns",
        MetricUnit.NS,
        "time before these kernels in which the device runs nothing",
        label="gap before",
    ),
    value_column(
        "peak_ratio",
        MetricUnit.RATIO,
        "operations / time / peak rate of the device; unknown without shapes",
        label="of peak",
    ),
    value_column(
        "bandwidth_ratio",
        MetricUnit.RATIO,
        "bytes that elementwise kernels, norms and copies of known shapes move at least / their "
        "time / memory bandwidth of the device",
        label="of bandwidth",
    ),
)
_KIND = text_column("kind", "kind of work, by the name and phase of the kernel")
_PHASE = text_column("phase", "phase in which the host issued the kernels")


@dataclass(frozen=True, slots=True)
class Kernels(TableResult):
    """The kernels of the profiled steps of one rank; all times are per step."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Kernels by unit, phase and kind",
        (unit_column("FSDP unit", lambda row: _unit_name(row.fqn)), _PHASE, _KIND, *_COUNTS),
    )
    KINDS: ClassVar[TableSpec] = TableSpec("Kernels by kind", (_KIND, *_COUNTS))
    NAMES: ClassVar[TableSpec] = TableSpec(
        "Longest kernels",
        (text_column("name", "kernel, or operator on a CPU"), _KIND, *_COUNTS),
    )

    rank: int
    on_device: bool
    steps: tuple[int, ...]
    step_ns: int
    """The mean duration of the profiled steps, under the profiler."""
    compute_ns: int
    communication_ns: int
    """Communication, also while compute runs."""
    gap_ns: int
    """Time in which the device runs nothing before a kernel."""
    unknown_ns: int
    """Compute whose kind the names do not show."""
    flops: int | None
    """Operations per step of matrix products and attention; None: the trace has no shapes."""
    peak_flops: float | None
    """Peak rate of the device; None if it is unknown."""
    peak_source: str
    kinds: tuple[KernelCost, ...]
    groups: tuple[KernelCost, ...]
    """By unit, phase and kind, the longest first."""
    names: tuple[KernelCost, ...]
    """By name, the longest first."""

    def rows(self) -> Sequence[KernelCost]:
        """The kernels by unit, phase and kind."""
        return self.groups

    @property
    def fusable_ns(self) -> int:
        """Time per step that fused kernels save at most."""
        return sum(cost.fusable_ns for cost in self.kinds)

    @property
    def most_fusable(self) -> KernelCost | None:
        """The unit and phase in which fused kernels save most; None: they save nothing."""
        found = max(self.groups, key=lambda cost: cost.fusable_ns, default=None)
        return found if found is not None and found.fusable_ns else None

    @property
    def peak_ratio(self) -> float | None:
        """Operations / step time / peak of the device: at most 1."""
        if not self.flops or not self.peak_flops or not self.step_ns:
            return None
        return self.flops / (self.step_ns / 1e9) / self.peak_flops


def find_kernels(run: RunSource, rank: int) -> KernelRecord | None:
    """The kernels of a rank, from its trace; None without a trace.

    Raises:
        ImportingError: The trace of the profiled steps is damaged.
    """
    found = run.kernels(rank)
    if found is not None and found.steps:
        return found
    content = run.profile(rank)
    units = [unit.fqn for unit in run.manifest.units]
    return None if content is None else read_profile(content, units)


def measure_kernels(run: RunSource, *, rank: int | None = None) -> Kernels:
    """The kernels of the profiled steps of a rank.

    Args:
        run: A run with profiled steps, or an imported trace.
        rank: Default the median rank, or the lowest rank with a profile.

    Raises:
        ImportingError: The trace of the profiled steps is damaged.
        MissingDataError: The rank has no profiled steps.
    """
    chosen = _ranks(run) if rank is None else [rank]
    for each in chosen:
        record = remember(run, ("kernels", each), partial(find_kernels, run, each))
        if record is not None:
            return sum_up(run, each, record)
    where = "The run" if rank is None else f"Rank {rank}"
    raise MissingDataError(
        f"{where} has no profiled steps. Expected an imported trace, or a run recorded with "
        '--profile-steps 20:23 or Recorder(profile_steps="20:23"). Record the run again.'
    )


def find_profile(run: RunSource) -> Kernels | None:
    """Like `measure_kernels`; None without profiled steps, or if their trace is damaged."""
    try:
        return measure_kernels(run)
    except (ImportingError, MissingDataError):
        return None


def _ranks(run: RunSource) -> list[int]:
    """The median rank, then the others."""
    median = timed_ranks(run).median
    ranks = [record.rank for record in run.ranks]
    return ranks if median is None else [median.rank, *(set(ranks) - {median.rank})]


def sum_up(run: RunSource, rank: int, record: KernelRecord) -> Kernels:
    """Sum a rank's record to costs per step."""
    units = {unit.index: unit.fqn for unit in run.manifest.units}
    peak, source = _peak(run)
    num_steps = max(len(record.steps), 1)
    gpu = find_gpu(run.manifest.device_name)
    bandwidth = None if gpu is None else gpu.memory_bytes_per_s
    sums = _Sums(num_steps, peak, bandwidth, record.on_device)
    rows = list(_rows(record))
    sums.compute_ns = sum(
        values["time_ns"] for keys, values in rows if KernelKind(keys["kind"]).is_compute
    )
    by_kind = sums.costs(rows, ("kind",), units, record.names)
    flops = sum(values["flops"] for _, values in rows) // num_steps
    return Kernels(
        rank=rank,
        on_device=record.on_device,
        steps=tuple(record.steps),
        step_ns=sum(record.step_ns) // num_steps,
        compute_ns=sums.compute_ns // num_steps,
        communication_ns=sum(
            cost.time_ns for cost in by_kind if cost.kind == KernelKind.COMMUNICATION.label
        ),
        gap_ns=sum(values["gap_ns"] for _, values in rows) // num_steps,
        unknown_ns=sum(cost.time_ns for cost in by_kind if cost.kind == KernelKind.OTHER.label),
        flops=flops or None,
        peak_flops=peak,
        peak_source=source,
        kinds=by_kind,
        groups=sums.costs(rows, ("unit", "phase", "kind"), units, record.names),
        names=sums.costs(rows, ("name", "kind"), units, record.names),
    )


_Row = tuple[dict[str, int], dict[str, int]]


def _rows(record: KernelRecord) -> Iterable[_Row]:
    """The keys and the values of each row."""
    columns = record.columns
    keys = ("unit", "phase", "kind", "name")
    for place in range(len(columns.step)):
        yield (
            {key: getattr(columns, key)[place] for key in keys},
            {name: getattr(columns, name)[place] for name in KERNEL_SUMS},
        )


@dataclass
class _Sums:
    num_steps: int
    peak: float | None
    bandwidth: float | None
    on_device: bool
    compute_ns: int = 0
    """Over all steps."""

    def costs(
        self,
        rows: Iterable[_Row],
        keys: tuple[str, ...],
        units: dict[int, str],
        names: Sequence[str],
    ) -> tuple[KernelCost, ...]:
        """Sum the rows with equal keys, the longest first."""
        totals: dict[tuple[int, ...], dict[str, int]] = defaultdict(
            lambda: dict.fromkeys(KERNEL_SUMS, 0)
        )
        for row_keys, values in rows:
            total = totals[tuple(row_keys[key] for key in keys)]
            for name in KERNEL_SUMS:
                total[name] += values[name]
        costs = []
        for key, total in totals.items():
            known = dict(zip(keys, key, strict=True))
            costs.append(self._cost(known, total, units, names))
        return tuple(sorted(costs, key=lambda cost: (-cost.time_ns, cost.kind, cost.name)))

    def _cost(
        self,
        known: dict[str, int],
        total: dict[str, int],
        units: dict[int, str],
        names: Sequence[str],
    ) -> KernelCost:
        kind = KernelKind(known["kind"])
        flops, time_ns = total["flops"], total["time_ns"]
        rate = flops / (time_ns / 1e9) if flops and time_ns else None
        moved, moved_ns = total["moved_bytes"], total["moved_ns"]
        moves = moved / (moved_ns / 1e9) if moved and moved_ns else None
        return KernelCost(
            fqn=units.get(known["unit"]) if "unit" in known else None,
            phase=Phase(known["phase"]).label if "phase" in known else "",
            kind=kind.label,
            name=names[known["name"]] if "name" in known else "",
            count=total["count"] / self.num_steps,
            small_ratio=total["num_small"] / max(total["count"], 1) if self.on_device else None,
            sum_ns=total["sum_ns"] // self.num_steps,
            time_ns=time_ns // self.num_steps,
            gap_ns=total["gap_ns"] // self.num_steps,
            flops=flops // self.num_steps or None,
            fusable_ns=total["fusable_ns"] // self.num_steps,
            compute_ratio=time_ns / self.compute_ns
            if kind.is_compute and self.compute_ns
            else None,
            peak_ratio=rate / self.peak if rate and self.peak else None,
            moved_bytes=moved // self.num_steps or None,
            bandwidth_ratio=moves / self.bandwidth if moves and self.bandwidth else None,
        )


def _peak(run: RunSource) -> tuple[float | None, str]:
    """The peak rate of matrix products on the device, and its source."""
    gpu = find_gpu(run.manifest.device_name)
    dtypes = {unit.param_dtype for unit in run.manifest.units}
    if gpu is None or not dtypes or not dtypes <= set(_NARROW):
        return None, ""
    return gpu.bf16_flops, f"{gpu.bf16_flops / 1e12:.0f} TFLOP/s of {gpu.name}, 16 bits"


def _unit_name(fqn: str | None) -> str | None:
    return None if fqn is None else format_unit(fqn)
