"""What does each number mean? Every metric once: name, label, unit, formula, which way is better.

The text reports, the dashboard and the table of docs/metrics.md take their words from here; names
are the keys of `--json` and the attributes of the result objects, so one name means one thing.
"""

from dataclasses import dataclass
from enum import StrEnum


class MetricUnit(StrEnum):
    """What a metric is counted in; text chooses the prefix."""

    NS = "ns"
    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    RATIO = "ratio"
    COUNT = "count"
    NUMBER = "number"


class Better(StrEnum):
    """Which way a change is an improvement."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"
    """Neither: it describes, or trades against something else."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that FSDP Inspect reports."""

    name: str
    label: str
    unit: MetricUnit
    definition: str
    better: Better = Better.LOWER


_NS, _BYTES, _RATIO, _COUNT = (
    MetricUnit.NS,
    MetricUnit.BYTES,
    MetricUnit.RATIO,
    MetricUnit.COUNT,
)

_ALL = (
    Metric(
        "step_time_ns",
        "step time",
        _NS,
        "from the end of the previous step to the end of this one; evaluation and checkpoints "
        "between them left out",
    ),
    Metric(
        "communication_ns",
        "communication",
        _NS,
        "union of all running collectives of a rank over all streams: two at once count once",
        Better.NEITHER,
    ),
    Metric(
        "exposed_ns",
        "exposed communication",
        _NS,
        "from the moment the compute stream (CPU: the main thread) begins to wait for a collective "
        "to that collective's end, where communication of the rank runs",
    ),
    Metric(
        "floor_ns",
        "exposed, floor",
        _NS,
        "the part of exposed that no setting hides: the first gather of each forward and the last "
        "reduction of each backward, which have no compute beside them",
        Better.NEITHER,
    ),
    Metric(
        "serialized_ns",
        "serialized",
        _NS,
        "exposed while queued behind another collective on the same communicator, or since it had "
        "queued behind one of another stream",
    ),
    Metric(
        "straggler_ns",
        "straggler",
        _NS,
        "exposed before the last rank arrived, where clocks can be aligned",
    ),
    Metric(
        "blocking_ns",
        "blocking",
        _NS,
        "exposed in collectives that block the host, gloo's default: a property of the backend",
    ),
    Metric(
        "late_issue_ns",
        "late issue",
        _NS,
        "exposed that an earlier issue had saved: min(exposed, issue - earliest); earliest: its "
        "stream's dependencies and the collective ahead on its communicator are done",
    ),
    Metric(
        "bandwidth_ns",
        "bandwidth",
        _NS,
        "the rest of exposed: more bytes than the compute beside them hides",
    ),
    Metric(
        "overlap_ratio",
        "overlap",
        _RATIO,
        "1 - exposed / communication; 100 % when nothing is communicated",
        Better.HIGHER,
    ),
    Metric(
        "forward_ns",
        "forward",
        _NS,
        "forward of the units, less the copies and waits inside it",
    ),
    Metric(
        "backward_ns",
        "backward",
        _NS,
        "backward of the units, recomputation included, less the copies and waits inside it",
    ),
    Metric(
        "recompute_ns",
        "recompute",
        _NS,
        "forward work that activation checkpointing repeats in backward",
    ),
    Metric(
        "fsdp_copies_ns",
        "FSDP copies",
        _NS,
        "copies between parameters and communication buffers on the compute stream",
    ),
    Metric(
        "copies_ns",
        "copies",
        _NS,
        "copies between the unit's parameters and its communication buffers, on any stream",
    ),
    Metric(
        "exposed_all_gather_ns",
        "exposed all-gather",
        _NS,
        "waiting for an FSDP all-gather that runs",
    ),
    Metric(
        "exposed_reduce_scatter_ns",
        "exposed reduce-scatter",
        _NS,
        "waiting for an FSDP reduce-scatter that runs",
    ),
    Metric(
        "exposed_all_reduce_ns",
        "exposed all-reduce",
        _NS,
        "waiting for an FSDP all-reduce (HSDP) that runs",
    ),
    Metric(
        "exposed_other_ns",
        "exposed, other",
        _NS,
        "waiting for a collective that FSDP did not issue: clipping, loss reduction, tensor "
        "parallel",
    ),
    Metric(
        "host_bound_ns",
        "host-bound",
        _NS,
        "the compute stream waits for a collective that has not begun",
    ),
    Metric("optimizer_ns", "optimizer", _NS, "the optimizer's step"),
    Metric("data_ns", "data", _NS, "waiting for the next batch"),
    Metric(
        "other_ns",
        "other",
        _NS,
        "what is left of the step: loss, clipping, logging, zeroing gradients",
    ),
    Metric(
        "between_ns",
        "between steps",
        _NS,
        "evaluation and checkpoints before the step; not in its time",
        Better.NEITHER,
    ),
    Metric(
        "count_per_step",
        "per step",
        _COUNT,
        "collectives of the unit in one step",
        Better.NEITHER,
    ),
    Metric(
        "bytes",
        "message",
        _BYTES,
        "full padded message of one collective: all-gather output, reduce-scatter input",
        Better.NEITHER,
    ),
    Metric(
        "communication_bytes",
        "communicated",
        _BYTES,
        "messages of all collectives of one step, full and padded, added up",
    ),
    Metric("collectives_per_step", "collectives", _COUNT, "collectives of one step"),
    Metric("duration_ns", "duration", _NS, "mean duration of one collective in the typical step"),
    Metric(
        "bus_bytes_per_s",
        "bus bandwidth",
        MetricUnit.BYTES_PER_S,
        "message x (N-1)/N / duration for all-gather and reduce-scatter, 2(N-1)/N for all-reduce, "
        "N ranks in the group (nccl-tests); none for N = 1",
        Better.HIGHER,
    ),
    Metric(
        "prefetched_per_step",
        "prefetched",
        _COUNT,
        "all-gathers issued before their own unit asked for them",
        Better.HIGHER,
    ),
    Metric(
        "lead_ns",
        "lead",
        _NS,
        "median time from the issue of an all-gather to the moment it was needed",
        Better.HIGHER,
    ),
    Metric(
        "hidden_ratio",
        "hidden",
        _RATIO,
        "share of the time all-gathers were in flight beside which the rank did not wait",
        Better.HIGHER,
    ),
    Metric(
        "unused_bytes",
        "never used",
        _BYTES,
        "messages of all-gathers that nobody waited for, over all timed steps",
    ),
    Metric(
        "transfer_ns",
        "transfer",
        _NS,
        "median time in which a collective's own bytes can have travelled: the shortest over the "
        "ranks, else from its turn on its communicator to its end",
    ),
    Metric(
        "latency_ns",
        "latency",
        _NS,
        "of a message without bytes: the constant of latency + bytes / bandwidth, fitted to the "
        "run's own collectives",
    ),
    Metric(
        "compute_ns",
        "own compute",
        _NS,
        "a unit's forward or backward less nested units, copies and waits",
    ),
    Metric(
        "beside_ratio",
        "beside communication",
        _RATIO,
        "share of a unit's own compute beside which communication ran",
        Better.NEITHER,
    ),
    Metric(
        "slowdown",
        "slowdown",
        MetricUnit.NUMBER,
        "time of compute beside communication / time of the same work alone; 1 is none",
    ),
    Metric(
        "num_parameters",
        "parameters",
        _COUNT,
        "parameters over all ranks, without padding",
        Better.NEITHER,
    ),
    Metric(
        "unsharded_bytes",
        "unsharded",
        _BYTES,
        "what unsharding allocates: the padded all-gather output in the parameter dtype",
        Better.NEITHER,
    ),
    Metric(
        "peak_allocated_bytes",
        "peak allocated",
        _BYTES,
        "highest bytes held by tensors, of the rank with the highest: the CUDA allocator's own "
        "count, on CPU the storage tracker's in memory steps",
    ),
    Metric(
        "peak_reserved_bytes",
        "peak reserved",
        _BYTES,
        "highest bytes that the CUDA allocator took from the device; none on CPU",
    ),
    Metric(
        "resting_bytes",
        "resting",
        _BYTES,
        "allocated at the end of the last sampled step",
    ),
    Metric(
        "step_adds_bytes",
        "a step adds",
        _BYTES,
        "peak allocated - resting",
    ),
    Metric(
        "device_ratio",
        "of the device",
        _RATIO,
        "peak reserved / memory of the device",
    ),
    Metric(
        "headroom_bytes",
        "headroom",
        _BYTES,
        "memory of the device - peak reserved: what the allocator never took",
        Better.HIGHER,
    ),
    Metric(
        "fragmentation_ratio",
        "fragmentation",
        _RATIO,
        "(reserved - active) / reserved at the sample with the most allocated: idle in the "
        "allocator's cache",
    ),
    Metric(
        "inactive_split_bytes",
        "not releasable",
        _BYTES,
        "free blocks in segments that are also in use, which the allocator cannot give back",
    ),
    Metric(
        "device_used_bytes",
        "device in use",
        _BYTES,
        "the most that NVML saw in use on the whole device, by every process",
    ),
    Metric(
        "outside_allocator_bytes",
        "outside the allocator",
        _BYTES,
        "device in use - reserved at that moment: CUDA context, NCCL, libraries, other processes",
    ),
    Metric(
        "num_alloc_retries",
        "allocation retries",
        _COUNT,
        "how often the allocator emptied its cache and tried again between its first and last "
        "sample",
    ),
    Metric(
        "num_ooms",
        "failed requests",
        _COUNT,
        "requests for memory that failed in the end, between the first and the last sample",
    ),
    Metric(
        "growth_bytes_per_step",
        "growth per step",
        _BYTES,
        "median slope (Theil-Sen) of what is allocated at the end of a step, after warm-up; none "
        "unless Mann-Kendall sees a trend (p < 0.01)",
    ),
    Metric(
        "steps_until_full",
        "steps until full",
        _COUNT,
        "(memory of the device - peak of the last step) / growth per step: at the latest",
        Better.HIGHER,
    ),
    Metric(
        "own_work_ns",
        "own work",
        _NS,
        "step time - exposed communication: what a rank does while it waits for no other",
    ),
    Metric(
        "skew_ns",
        "skew",
        _NS,
        "from the arrival of the first rank at a collective to that of the last, on aligned clocks",
    ),
    Metric(
        "pure_transfer_ns",
        "pure transfer",
        _NS,
        "the shortest duration of a collective over its ranks: what it takes once all are there",
    ),
    Metric(
        "skewed_ratio",
        "skewed",
        _RATIO,
        "share of the collectives whose skew is longer than their transfer",
    ),
    Metric(
        "last_ratio",
        "last",
        _RATIO,
        "share of the collectives at which the rank arrived last",
        Better.NEITHER,
    ),
    Metric(
        "lateness_ns",
        "late",
        _NS,
        "from the arrival of the first rank at a collective to that of this rank (median)",
    ),
    Metric(
        "shortest_ratio",
        "waits least",
        _RATIO,
        "share of the collectives that are shortest on this rank; needs no aligned clocks",
        Better.NEITHER,
    ),
    Metric(
        "late_ns",
        "late, the straggler",
        _NS,
        "where the straggler is last: from the arrival of the rank in the middle of the others to "
        "its own (median)",
    ),
    Metric(
        "meanwhile_ns",
        "meanwhile",
        _NS,
        "how much longer a part of the straggler's own work takes than on the rank in the middle",
    ),
    Metric(
        "cost_ns",
        "cost of the straggler",
        _NS,
        "what the typical step would be shorter without what the straggler regularly works longer: "
        "the least of its median excess work, the replayed step - the same with its work like that "
        "of the rank in the middle of the others, and all ranks like it - all like that one",
    ),
    Metric("cost_ratio", "cost of the straggler, share", _RATIO, "cost / median step"),
    Metric(
        "imbalance_ns",
        "imbalance",
        _NS,
        "step replayed on all ranks - the same with every rank working like the one in the middle",
    ),
    Metric(
        "error_ratio",
        "self-check of the replay",
        _RATIO,
        "|replayed - recorded| / recorded, of the steps that the replay was read from; not the "
        "error of a prediction",
    ),
    Metric("loss", "loss", MetricUnit.NUMBER, "as the training loop logged it"),
)

METRICS = {metric.name: metric for metric in _ALL}
"""Every metric by name, in the order in which a reader meets them."""


def find_metric(name: str) -> Metric:
    """The metric of that name.

    Raises:
        KeyError: There is none: a report shows a number that is not defined here.
    """
    if name not in METRICS:
        raise KeyError(f"no metric {name!r} in fsdp_inspect.metrics; define it there first")
    return METRICS[name]


_ALONE = "runs while no compute kernel of its rank does"
_IN_KERNEL_TRACES = {
    "exposed_ns": f"communication that {_ALONE}; who waits for it is not told",
    "exposed_all_gather_ns": f"an all-gather {_ALONE}",
    "exposed_reduce_scatter_ns": f"a reduce-scatter {_ALONE}",
    "exposed_all_reduce_ns": f"an all-reduce {_ALONE}",
    "exposed_other_ns": f"communication that no FSDP unit owns {_ALONE}",
    "host_bound_ns": "the device is idle: no kernel, no copy and no communication runs",
    "forward_ns": "compute kernels of forward",
    "backward_ns": "compute kernels of backward, recomputation included",
    "optimizer_ns": "compute kernels of the optimizer",
    "other_ns": "compute kernels of unknown phase; the device's other copies",
}
"""What is defined otherwise where it is known when kernels ran, and not who waited for whom."""


def define_metric(name: str, *, in_kernel_trace: bool = False) -> str:
    """What a metric means, for a recorded run or for one imported from a profiler's trace.

    Raises:
        KeyError: No metric has that name.
    """
    definition = find_metric(name).definition
    return _IN_KERNEL_TRACES.get(name, definition) if in_kernel_trace else definition
