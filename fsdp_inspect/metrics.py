"""Define every metric once: name, label, unit, formula, and the direction of an improvement.

The text reports, the dashboard and the table of docs/metrics.md use these definitions. The names
are the keys of `--json` and the attributes of the result objects, so a name has one meaning.
"""

from dataclasses import dataclass
from enum import StrEnum


class MetricUnit(StrEnum):
    """The unit of measure of a metric. Text output chooses the prefix."""

    NS = "ns"
    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    RATIO = "ratio"
    COUNT = "count"
    NUMBER = "number"


class Better(StrEnum):
    """The direction of a change that is an improvement."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"
    """The metric is descriptive, or it trades against another metric."""


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
        "from the end of the previous step to the end of this one, without evaluation and "
        "checkpoints between them",
    ),
    Metric(
        "communication_ns",
        "communication",
        _NS,
        "union of all running collectives of a rank over all streams; simultaneous collectives "
        "count once",
        Better.NEITHER,
    ),
    Metric(
        "exposed_ns",
        "exposed communication",
        _NS,
        "from the moment the compute stream (CPU: the main thread) begins to wait for a "
        "collective to the collective's end, as long as communication of the rank runs",
    ),
    Metric(
        "floor_ns",
        "floor",
        _NS,
        "the rest of the exposed time of the first all-gather of each forward and the last "
        "reduction of each backward; no compute runs next to them: it can be shortened, not hidden",
        Better.NEITHER,
    ),
    Metric("step_ratio", "share of the step", _RATIO, "time / step time"),
    Metric(
        "serialized_ns",
        "serialized",
        _NS,
        "exposed time for which an earlier collective on the same communicator delays this one",
    ),
    Metric(
        "run_delay_ratio",
        "time without a core",
        _RATIO,
        "time in which the training thread is ready to run and has no CPU core / time of the "
        "recording, as the Linux scheduler counts it",
    ),
    Metric(
        "spread_ratio",
        "spread",
        _RATIO,
        "how much the typical steps vary: half of (longest - shortest) / their mean",
    ),
    Metric(
        "self_check_ratio",
        "self-check",
        _RATIO,
        "simulated / measured step time of the recorded plan - 1: at 0% the simulation reproduces "
        "the recorded step; predictions of other plans have at least this error",
        Better.NEITHER,
    ),
    Metric(
        "straggler_ns",
        "straggler",
        _NS,
        "exposed time before the last rank arrives; known only if clocks can be aligned",
    ),
    Metric(
        "blocking_ns",
        "blocking",
        _NS,
        "exposed time of collectives that block the host, as gloo does by default: a property "
        "of the backend",
    ),
    Metric(
        "late_issue_ns",
        "late issue",
        _NS,
        "exposed time that an earlier issue would have saved: min(exposed, issue - earliest); "
        "earliest: the moment at which the dependencies of its stream and the previous "
        "collective on its communicator have ended",
    ),
    Metric(
        "bandwidth_ns",
        "transfer",
        _NS,
        "the rest of the exposed time: the transfer takes longer than the compute that could "
        "hide it",
    ),
    Metric(
        "overlap_ratio",
        "overlap",
        _RATIO,
        "1 - exposed / communication; unknown without communication",
        Better.HIGHER,
    ),
    Metric(
        "forward_ns",
        "forward",
        _NS,
        "forward of the units, with FSDP's hooks on the host, without recorded copies and waits",
    ),
    Metric(
        "backward_ns",
        "backward",
        _NS,
        "backward of the units, with recomputation and FSDP's hooks on the host, without recorded "
        "copies and waits",
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
        "exposed other",
        _NS,
        "waiting for a collective that FSDP did not issue: gradient clipping, loss reduction, "
        "tensor parallel",
    ),
    Metric(
        "host_bound_ns",
        "host-bound",
        _NS,
        "the compute stream waits for a collective that has not started",
    ),
    Metric(
        "host_behind_ns",
        "host behind",
        _NS,
        "the device has passed a mark, and the host has not issued the next one: an upper bound of "
        "the device's idle time for lack of work; overlaps the parts of the step",
    ),
    Metric(
        "device_idle_ns",
        "device idle",
        _NS,
        "the device waits for the host: host-bound, or the smaller of: host behind; "
        "step time x (1 - device utilisation)",
    ),
    Metric("optimizer_ns", "optimizer", _NS, "the optimizer's step"),
    Metric("data_ns", "data", _NS, "waiting for the next batch"),
    Metric(
        "other_ns",
        "other",
        _NS,
        "the rest of the step: loss, clipping, logging, generation, batches of no DataLoader",
    ),
    Metric(
        "late_ranks_ns",
        "waits for late ranks",
        _NS,
        "the waits of a simulated step for ranks that work longer, which no plan changes; in a "
        "recorded step, a part of the exposed collectives",
    ),
    Metric(
        "kept_ns",
        "kept as recorded",
        _NS,
        "the part of a simulated step that no plan changes: optimizer, data, collectives that FSDP "
        "did not issue, forward and backward outside the units, and other",
    ),
    Metric(
        "between_ns",
        "between steps",
        _NS,
        "evaluation and checkpoints before the step; not part of its time",
        Better.NEITHER,
    ),
    Metric(
        "count_per_step",
        "count per step",
        _COUNT,
        "collectives of the unit in one step, mean over all timed steps",
        Better.NEITHER,
    ),
    Metric(
        "bytes",
        "message",
        _BYTES,
        "full padded message of one collective: the output of an all-gather, the input of a "
        "reduce-scatter",
        Better.NEITHER,
    ),
    Metric(
        "communication_bytes",
        "communicated bytes",
        _BYTES,
        "sum of the full padded messages of all collectives of one step",
    ),
    Metric("collectives_per_step", "collectives", _COUNT, "number of collectives in one step"),
    Metric("duration_ns", "duration", _NS, "mean duration of one collective in the typical step"),
    Metric(
        "bus_bytes_per_s",
        "bus bandwidth",
        MetricUnit.BYTES_PER_S,
        "message x (N-1)/N / duration for all-gather and reduce-scatter, 2(N-1)/N for "
        "all-reduce, N ranks in the group (nccl-tests); missing for N = 1",
        Better.HIGHER,
    ),
    Metric(
        "prefetched_per_step",
        "prefetched",
        _COUNT,
        "all-gathers issued before their own unit needs them",
        Better.HIGHER,
    ),
    Metric(
        "lead_ns",
        "lead",
        _NS,
        "mean time from the issue of an all-gather to its need",
        Better.HIGHER,
    ),
    Metric(
        "hidden_ratio",
        "hidden",
        _RATIO,
        "fraction of the time in flight of all-gathers during which the rank did not wait",
        Better.HIGHER,
    ),
    Metric(
        "unused_bytes",
        "unused all-gathers",
        _BYTES,
        "messages of all-gathers that nothing waited for, over all timed steps",
    ),
    Metric(
        "transfer_ns",
        "transfer",
        _NS,
        "mean time that a collective's own bytes take: its shortest duration over the ranks, which "
        "is that of the last rank to arrive; of one rank, the time from its turn on its "
        "communicator to its end",
    ),
    Metric(
        "latency_ns",
        "latency",
        _NS,
        "duration of a message without bytes: the constant of latency + bytes / bandwidth, "
        "fitted to the run's own collectives",
    ),
    Metric(
        "compute_ns",
        "own compute",
        _NS,
        "a unit's forward or backward without nested units, copies and waits",
    ),
    Metric(
        "beside_ratio",
        "during communication",
        _RATIO,
        "fraction of a unit's own compute during which communication ran",
        Better.NEITHER,
    ),
    Metric(
        "slowdown",
        "slowdown",
        MetricUnit.NUMBER,
        "time of compute during communication / time of the same work alone; 1 means no slowdown",
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
        "memory that unsharding allocates: the padded all-gather output, in the parameter dtype",
        Better.NEITHER,
    ),
    Metric(
        "peak_allocated_bytes",
        "peak allocated",
        _BYTES,
        "highest bytes that tensors hold, on the rank with the highest peak; counted by the CUDA "
        "allocator, on CPU by the storage tracker in memory steps",
    ),
    Metric(
        "peak_reserved_bytes",
        "peak reserved",
        _BYTES,
        "highest bytes that the CUDA allocator took from the device; missing on CPU",
    ),
    Metric(
        "resting_bytes",
        "resting",
        _BYTES,
        "allocated at the end of the last sampled step",
    ),
    Metric(
        "step_adds_bytes",
        "peak above resting",
        _BYTES,
        "peak allocated - resting",
    ),
    Metric(
        "device_ratio",
        "device fraction",
        _RATIO,
        "peak reserved / memory of the device",
    ),
    Metric(
        "headroom_bytes",
        "headroom",
        _BYTES,
        "memory of the device - peak reserved: memory that the allocator never took",
        Better.HIGHER,
    ),
    Metric(
        "fragmentation_ratio",
        "fragmentation",
        _RATIO,
        "(reserved - active) / reserved at the sample with the most allocated: unused memory in "
        "the allocator's cache",
    ),
    Metric(
        "inactive_split_bytes",
        "not releasable",
        _BYTES,
        "free blocks in segments that are also in use; the allocator cannot return them",
    ),
    Metric(
        "device_used_bytes",
        "device in use",
        _BYTES,
        "highest memory in use on the whole device, by all processes, as NVML reports it",
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
        "number of times that the allocator emptied its cache and tried again, between the first "
        "and the last sample",
    ),
    Metric(
        "num_ooms",
        "failed allocations",
        _COUNT,
        "allocations that failed after the retry, between the first and the last sample",
    ),
    Metric(
        "growth_bytes_per_step",
        "growth per step",
        _BYTES,
        "median slope (Theil-Sen) of the allocated memory at the end of a step, after warm-up; "
        "missing unless Mann-Kendall finds a trend (p < 0.01)",
    ),
    Metric(
        "steps_until_full",
        "steps until full",
        _COUNT,
        "(memory of the device - peak of the last step) / growth per step: an upper bound",
        Better.HIGHER,
    ),
    Metric(
        "own_work_ns",
        "own work",
        _NS,
        "step time - exposed communication: the time that a rank does not wait for other ranks",
    ),
    Metric(
        "busiest_ratio",
        "busiest",
        _RATIO,
        "fraction of the steps in which no other rank has more own work",
        Better.NEITHER,
    ),
    Metric(
        "skew_ns",
        "skew",
        _NS,
        "from the arrival of the first rank at a collective to the arrival of the last, on "
        "aligned clocks",
    ),
    Metric(
        "skewed_ratio",
        "skewed collectives",
        _RATIO,
        "fraction of the collectives whose skew is longer than their transfer",
    ),
    Metric(
        "last_ratio",
        "last arrivals",
        _RATIO,
        "fraction of the collectives at which the rank arrives last",
        Better.NEITHER,
    ),
    Metric(
        "lateness_ns",
        "lateness",
        _NS,
        "median time from the arrival of the first rank at a collective to the arrival of this "
        "rank",
    ),
    Metric(
        "shortest_ratio",
        "shortest collectives",
        _RATIO,
        "fraction of the collectives that are shortest on this rank, because it waits least; "
        "needs no aligned clocks",
        Better.NEITHER,
    ),
    Metric(
        "late_ns",
        "straggler lateness",
        _NS,
        "median over the collectives at which the straggler arrives last: its arrival - the "
        "median arrival of the other ranks",
    ),
    Metric(
        "meanwhile_ns",
        "straggler extra work",
        _NS,
        "extra duration, in the typical step, of the part of the straggler's own work that exceeds "
        "the median of the other ranks most",
    ),
    Metric(
        "cost_ns",
        "straggler cost",
        _NS,
        "decrease of the typical step without the straggler's systematic extra work; the "
        "smallest of (1) its median extra work, (2) the replayed step - the step replayed with the "
        "work of the median other rank instead of its own, (3) the step replayed with its work on "
        "all ranks - the step replayed with the work of the median other rank on all ranks",
    ),
    Metric(
        "cost_low_ns",
        "smallest straggler cost",
        _NS,
        "the smallest decrease of a window of replayed steps without the straggler's extra work",
    ),
    Metric(
        "cost_high_ns",
        "largest straggler cost",
        _NS,
        "the largest decrease of a window of replayed steps without the straggler's extra work",
    ),
    Metric("cost_ratio", "straggler cost ratio", _RATIO, "straggler cost / typical step"),
    Metric(
        "imbalance_ns",
        "imbalance",
        _NS,
        "replayed step - the mean over the ranks of the replayed step in which every rank works "
        "like that rank",
    ),
    Metric(
        "error_ratio",
        "replay error",
        _RATIO,
        "absolute difference between the replayed and the recorded step / recorded step, for the "
        "steps that the replay was read from; not the error of a prediction",
    ),
    Metric(
        "tokens_per_s",
        "tokens per second",
        _COUNT,
        "tokens of all ranks in a step / step time, or the rate that the training loop logs; the "
        "tokens come from a logged total or from the settings seq_len, batch_size and microbatches",
        Better.HIGHER,
    ),
    Metric(
        "mfu_ratio",
        "MFU",
        _RATIO,
        "model FLOPs per second / peak FLOPs of all devices, as the training loop logs it, or for "
        "dense decoders in bfloat16: tokens per second x (6 x matrix elements + causal attention); "
        "for other models the operations of profiled steps, which include recomputation",
        Better.HIGHER,
    ),
    Metric(
        "energy_j_per_step",
        "GPU energy per step, J",
        MetricUnit.NUMBER,
        "mean power of the GPU of one rank in timed steps (NVML) x typical step",
        Better.LOWER,
    ),
    Metric(
        "energy_j_per_token",
        "GPU energy per token, J",
        MetricUnit.NUMBER,
        "mean power of the GPU of one rank in timed steps (NVML) x ranks / tokens per second",
        Better.LOWER,
    ),
    Metric(
        "cpu_energy_j_per_step",
        "CPU energy per step, J",
        MetricUnit.NUMBER,
        "mean power of all CPU packages of one host in timed steps (RAPL) x typical step",
        Better.LOWER,
    ),
    Metric(
        "device_utilisation_ratio",
        "device utilisation",
        _RATIO,
        "fraction of the time in which a kernel ran (NVML), mean over the readings in timed steps",
        Better.HIGHER,
    ),
    Metric(
        "goodput_ratio",
        "goodput",
        _RATIO,
        "time of the phase training / wall time; this phase includes waits inside steps, and "
        "leaves out the first step of each attempt, steps lost at a restart, evaluation, "
        "checkpoints, compilation and standstills",
        Better.HIGHER,
    ),
    Metric(
        "wall_ns",
        "wall time",
        _NS,
        "from the start of the first process to the end of the last recording, restarts included",
    ),
    Metric("wall_ratio", "share of the wall time", _RATIO, "time / wall time", Better.NEITHER),
    Metric("loss", "loss", MetricUnit.NUMBER, "as logged by the training loop"),
)

METRICS = {metric.name: metric for metric in _ALL}
"""All metrics by name, in the order of the table in docs/metrics.md."""


def find_metric(name: str) -> Metric:
    """Return the metric with this name.

    Raises:
        KeyError: No metric has this name.
    """
    if name not in METRICS:
        raise KeyError(f"no metric {name!r} in fsdp_inspect.metrics; define it there first")
    return METRICS[name]


_ALONE = "runs while no compute kernel of its rank runs"
_IN_KERNEL_TRACES = {
    "exposed_ns": f"communication that {_ALONE}; the trace does not show waits",
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
"""Definitions for kernel traces, which record the times of kernels but rarely their waits."""


def define_metric(name: str, *, in_kernel_trace: bool = False) -> str:
    """Return the definition of a metric, for a recorded run or an imported kernel trace.

    Raises:
        KeyError: No metric has this name.
    """
    definition = find_metric(name).definition
    return _IN_KERNEL_TRACES.get(name, definition) if in_kernel_trace else definition
