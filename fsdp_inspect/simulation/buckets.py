"""Predict a step of `DistributedDataParallel` (DDP) with other buckets, from one recorded run.

[Note: The model of buckets]
DDP sums the gradients of a bucket as soon as its last gradient is ready. The all-reduces run one
after the other on one communicator while backward computes. After the last gradient, backward waits
for the remaining ones. The simulation needs

- the time at which each gradient is ready: measured at the ends of the recorded buckets, and
  inferred between them, in proportion to the bytes;
- the duration of an all-reduce of any size: the cost line that is fitted to the run's own ones
  (`simulation.network`).

The rest of the step stays as recorded: compute, copies, other collectives, and their waits. The
recorded buckets are simulated too, so that the error of the model is known.

torch 2.13 assigns parameters to buckets in the order in which their gradients became ready
(`compute_bucket_assignment_by_size` in reducer.cpp): a bucket of one dtype is full at
`bucket_cap_mb`. With `find_unused_parameters`, it assigns them in the order of the model, and
reduces the buckets in reverse.

On CPU, an all-reduce takes cores from the backward beside it, and is slower than one after it. How
much is unknown, so the interval includes all-reduces as fast as the fastest tenth of the recorded
ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import inspected_rank
from fsdp_inspect.analysis.trust import Trust, measure_trust
from fsdp_inspect.columns import TableSpec, metric_column, unit_column, value_column
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.simulation.network import (
    CostLine,
    Network,
    Pace,
    fit_network,
    known_lines,
    unknown_latencies,
)
from fsdp_inspect.simulation.recorded import with_own_turns
from fsdp_inspect.statistics import half_range_ratio
from fsdp_inspect.trace.codes import ITEMSIZE, EventKind, Phase
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import RunSource, Unit
from fsdp_inspect.trace.sharders import DDP
from fsdp_inspect.trace.tables import EventTable

_MIB = float(1 << 20)
_CAPS_MB = (1, 2, 5, 10, 25, 50, 100, 200, 400, 1000)
"""The sizes that `find_best_buckets` tries."""


@dataclass(frozen=True, slots=True)
class SimulatedBucket:
    """One bucket in a simulated backward."""

    name: str
    num_tensors: int
    message_bytes: int
    ready_ns: int
    """From the begin of backward until its last gradient is ready."""
    start_ns: int
    """From the begin of backward until its all-reduce starts."""
    duration_ns: int


@dataclass(frozen=True, slots=True)
class BucketStep:
    """A simulated step with given buckets."""

    step_time_ns: int
    exposed_ns: int
    """Waits for all-reduces of buckets in the step."""
    communication_ns: int
    """All-reduces of buckets in the step."""
    buckets: tuple[SimulatedBucket, ...]
    """The buckets of one backward, in the order of their all-reduces."""


@dataclass(frozen=True, slots=True)
class BucketSimulation(TableResult):
    """The predicted step of a DDP run with other buckets."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Buckets of the plan",
        (
            unit_column("The bucket, in the order of the all-reduces.", attrgetter("name")),
            value_column(
                "num_tensors", MetricUnit.COUNT, "parameters in the bucket", label="tensors"
            ),
            metric_column("message_bytes", metric="bytes"),
            metric_column("ready_ns", metric="duration_ns", label="ready at"),
            metric_column("start_ns", metric="duration_ns", label="starts at"),
            metric_column("duration_ns", label="all-reduce"),
        ),
    )

    run_id: str
    rank: int
    num_steps: int
    """The recorded steps behind it."""
    bucket_cap_mb: float
    """MiB at which a bucket is full; NaN: the recorded size, which torch did not log."""
    overlaps: bool
    """Whether all-reduces run while backward computes."""
    recorded_step_ns: int
    """Measured: the typical step of the rank."""
    recorded_exposed_ns: int
    """Measured: waits for all-reduces of buckets in these steps."""
    replayed: BucketStep
    """The recorded buckets, simulated."""
    replay_error: float
    """replayed / recorded - 1."""
    predicted: BucketStep
    low_ns: int
    high_ns: int
    """The interval of the step time, as in `simulation.simulate`."""
    change: float
    """predicted / replayed - 1. Both are simulated, so the error of the self-check cancels."""
    gain_low_ns: int
    gain_high_ns: int
    """The interval of the time that the buckets save in a step; negative: they cost time."""
    assumptions: tuple[str, ...]
    caveats: tuple[str, ...]

    def rows(self) -> Sequence[SimulatedBucket]:
        """One row per bucket of the plan."""
        return self.predicted.buckets


class _Gradient(NamedTuple):
    """The gradient of one parameter."""

    num_bytes: int
    dtype: str
    ready_ns: float
    """From the begin of backward; mean over the recorded backwards."""


class _Backwards(NamedTuple):
    """The mean of the recorded backwards that reduce buckets."""

    per_step: float
    """Number of these backwards in a step."""
    ready_ns: NDArray[np.float64]
    """From the begin of backward until each bucket is ready; NaN: its all-reduce was queued."""
    ends_ns: float
    """From the begin of backward until it waits for buckets."""

    @property
    def is_inferred(self) -> bool:
        """Whether the time of some buckets is unknown."""
        return bool(np.isnan(self.ready_ns).any())


@dataclass(frozen=True)
class BucketWork:
    """What the recorded steps of one rank show; see [Note: The model of buckets]."""

    run_id: str
    rank: int
    num_steps: int
    num_ranks: int
    step_time_ns: int
    exposed_ns: float
    """Waits for buckets in a step."""
    backwards_per_step: float
    computes_ns: float
    """From the begin of a backward until it waits for buckets."""
    gradients: tuple[_Gradient, ...]
    """In the order in which they are ready."""
    recorded: tuple[tuple[int, ...], ...]
    """The gradients of each recorded bucket."""
    cap_mb: float
    """The recorded `bucket_cap_mb`."""
    is_inferred: bool
    """Whether the time of some recorded buckets is inferred."""
    in_model_order: bool
    """Whether torch assigns the parameters in the order of the model."""
    network: Network
    fastest: float
    """The duration of the fastest tenth of the recorded all-reduces, / that of the cost line."""
    trust: Trust

    def paces(self, network: Network) -> list[tuple[Network, Network]]:
        """The ends of the uncertainty: the networks of the recorded buckets and of the plan.

        The error of the line is in both, so a gain compares equal paces. Contention on a CPU is
        not: the recorded all-reduces had it, and those of the plan may be free of it.
        """
        found = [
            (self.network.at(pace), network.at(pace))
            for pace in (Pace.FAST, Pace.TYPICAL, Pace.SLOW)
        ]
        if self.fastest < 1:
            line = network.lines[EventKind.ALL_REDUCE]
            free = CostLine(line.latency_ns * self.fastest, line.bus_bytes_per_s / self.fastest)
            lines = {**network.lines, EventKind.ALL_REDUCE: free}
            found.append((self.network.at(Pace.TYPICAL), replace(network, lines=lines)))
        return found

    def simulate(
        self,
        buckets: Sequence[Sequence[int]],
        network: Network | None = None,
        *,
        overlaps: bool = True,
    ) -> BucketStep:
        """Simulate a step with given buckets, each a list of gradients."""
        line = (network or self.network).lines[EventKind.ALL_REDUCE]
        factor = bus_factor(EventKind.ALL_REDUCE, self.num_ranks)
        end, found = 0.0, []
        for place, members in enumerate(buckets):
            size = sum(self.gradients[each].num_bytes for each in members)
            ready = max(self.gradients[each].ready_ns for each in members)
            start = max(end, ready if overlaps else self.computes_ns)
            duration = line.duration_ns(size, factor)
            end = start + duration
            found.append(
                SimulatedBucket(
                    f"bucket {place}", len(members), size, round(ready), round(start), duration
                )
            )
        exposed = max(end - self.computes_ns, 0.0) * self.backwards_per_step
        return BucketStep(
            step_time_ns=round(self.step_time_ns - self.exposed_ns + exposed),
            exposed_ns=round(exposed),
            communication_ns=round(self.backwards_per_step * sum(b.duration_ns for b in found)),
            buckets=tuple(found),
        )

    def assign(self, cap_mb: float) -> list[list[int]]:
        """The buckets that torch makes with a `bucket_cap_mb`."""
        full: list[list[int]] = []
        open_: dict[str, list[int]] = {}
        sizes: Counter[str] = Counter()
        places = range(len(self.gradients))
        for at in reversed(places) if self.in_model_order else places:
            each = self.gradients[at]
            open_.setdefault(each.dtype, []).append(at)
            sizes[each.dtype] += each.num_bytes
            if sizes[each.dtype] >= cap_mb * _MIB:
                full.append(open_.pop(each.dtype))
                sizes[each.dtype] = 0
        full += open_.values()
        return full[::-1] if self.in_model_order else full


def measure_buckets(run: RunSource, *, rank: int | None = None) -> BucketWork:
    """Measure the backwards of a DDP run.

    Args:
        run: A recorded run of `DistributedDataParallel`.
        rank: Default: the median rank.

    Raises:
        MissingDataError: The run is of another sharder, or its steps do not show buckets that
            overlap with backward.
    """
    manifest = run.manifest
    if manifest.sharder != DDP:
        raise MissingDataError(
            f"Run {manifest.run_id!r} has no buckets: it uses {manifest.sharder_traits.title}. "
            "Expected a run of DistributedDataParallel."
        )
    member = inspected_rank(run, rank)
    if member is None or not manifest.units:
        raise MissingDataError(_refuse(run, "it has no timed step with buckets"))
    steps = tuple(member.typical_steps.tolist())
    events = with_own_turns(run.events(member.rank, steps=steps))
    backwards = _measure_backwards(
        events, len(manifest.units), len(steps), on_host=manifest.device_type == "cpu"
    )
    if backwards is None:
        raise MissingDataError(
            _refuse(run, "its backwards do not reduce every bucket once, in the same order")
        )
    network = fit_network(events, manifest.process_groups, known_lines(run))
    if EventKind.ALL_REDUCE not in network.lines:
        raise MissingDataError(_refuse(run, "no all-reduce of a bucket was timed"))
    waits = _of_buckets(events, EventKind.ALL_REDUCE_WAIT)
    group = manifest.units[0].replicate_group
    ranks = next((each.ranks for each in manifest.process_groups if each.index == group), ())
    num_ranks = len(ranks) or manifest.world_size
    observed = manifest.observed
    searches = observed.get("find_unused_parameters") == "True"
    in_model_order = searches and observed.get("static_graph") != "True"
    gradients, recorded = _spread_gradients(manifest.units, backwards, in_model_order)
    times = member.step_time_ns[np.isin(member.steps, steps)]
    return BucketWork(
        run_id=manifest.run_id,
        rank=member.rank,
        num_steps=len(steps),
        num_ranks=num_ranks,
        step_time_ns=member.typical(member.step_time_ns),
        exposed_ns=float((waits.end_ns - waits.start_ns).sum()) / len(steps),
        backwards_per_step=backwards.per_step,
        computes_ns=backwards.ends_ns,
        gradients=gradients,
        recorded=recorded,
        cap_mb=_number(observed.get("bucket_cap_mb")),
        is_inferred=backwards.is_inferred,
        in_model_order=in_model_order,
        network=network,
        fastest=_fastest(events, network, num_ranks)
        if manifest.device_type == "cpu" and manifest.source != "emulated"
        else 1.0,
        trust=replace(
            measure_trust(run),
            spread_ratio=half_range_ratio(times.tolist()),
            num_steps=len(steps),
        ),
    )


def _fastest(events: EventTable, network: Network, num_ranks: int) -> float:
    rows, line = _of_buckets(events, EventKind.ALL_REDUCE), network.lines[EventKind.ALL_REDUCE]
    expected = [
        line.duration_ns(size, bus_factor(EventKind.ALL_REDUCE, num_ranks))
        for size in rows.bytes.tolist()
    ]
    return float(np.percentile((rows.end_ns - rows.start_ns) / np.maximum(expected, 1), 10))


def _number(text: str | None) -> float:
    """The number of a setting; NaN: unknown."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _refuse(run: RunSource, why: str) -> str:
    return (
        f"The buckets of run {run.manifest.run_id!r} cannot be simulated: {why}. Expected timed "
        "steps of one DistributedDataParallel model without a communication hook. "
        "`fsdp-inspect show RUN exposed` shows the measured waits."
    )


def _of_buckets(events: EventTable, kind: EventKind) -> EventTable:
    return events.where(
        (events.kind == kind) & (events.phase == Phase.BACKWARD) & (events.unit >= 0)
    )


def _measure_backwards(
    events: EventTable, num_units: int, num_steps: int, *, on_host: bool
) -> _Backwards | None:
    """The mean backward; None if the backwards do not reduce every bucket once, in order."""
    begun = events.where(events.kind == EventKind.BACKWARD)
    begins = dict(zip(_keys(begun), begun.start_ns.tolist(), strict=True))
    reduced = _of_buckets(events, EventKind.ALL_REDUCE)
    waits = _of_buckets(events, EventKind.ALL_REDUCE_WAIT)
    keys = _keys(reduced)
    order = np.lexsort((reduced.issue_ns, reduced.microbatch, reduced.step))
    count = len({*keys})
    expected = np.tile(np.arange(num_units), count)
    if not count or not np.array_equal(reduced.unit[order], expected):
        return None
    if len(begins) != len(begun) or not {*keys} <= {*begins}:
        return None
    since = np.array([begins[key] for key in keys])[order].reshape(count, -1)
    ready = (reduced.issue_ns if on_host else reduced.start_ns)[order].reshape(count, -1) - since
    is_queued = np.zeros(num_units, bool)
    if not on_host:  # a queued all-reduce does not show when its bucket was ready
        ends = reduced.end_ns[order].reshape(count, -1) - since
        is_queued[1:] = np.mean(ready[:, 1:] <= ends[:, :-1], axis=0) > 0.5
    first_wait: dict[tuple[int, int], int] = {}
    for key, start in zip(_keys(waits), waits.start_ns.tolist(), strict=True):
        first_wait[key] = min(start, first_wait.get(key, start))
    if {*first_wait} != {*keys}:
        return None
    ends_ns = float(np.mean([start - begins[key] for key, start in first_wait.items()]))
    mean = np.where(is_queued, np.nan, ready.mean(axis=0))
    return _Backwards(count / num_steps, mean, ends_ns)


def _keys(events: EventTable) -> list[tuple[int, int]]:
    """The backward of each row: step and microbatch."""
    return list(zip(events.step.tolist(), events.microbatch.tolist(), strict=True))


def _spread_gradients(
    units: Sequence[Unit], backwards: _Backwards, in_model_order: bool
) -> tuple[tuple[_Gradient, ...], tuple[tuple[int, ...], ...]]:
    """The gradients in the order in which they are ready, and those of each recorded bucket."""
    sizes = [
        math.prod(shape) * ITEMSIZE[unit.reduce_dtype]
        for unit in units
        for shape in list(unit.parameters.values())[:: -1 if in_model_order else 1]
    ]
    counts = [len(unit.parameters) for unit in units]
    bytes_ready = np.cumsum(sizes)
    lasts = np.cumsum(counts) - 1
    is_known = ~np.isnan(backwards.ready_ns)
    ready = np.interp(
        bytes_ready,
        [0.0, *bytes_ready[lasts][is_known]],
        [0.0, *np.maximum.accumulate(backwards.ready_ns[is_known])],
    )
    dtypes = [unit.reduce_dtype for unit in units for _ in unit.parameters]
    gradients = tuple(map(_Gradient, sizes, dtypes, ready.tolist()))
    firsts = [0, *accumulate(counts)]
    return gradients, tuple(tuple(range(*span)) for span in pairwise(firsts))


def simulate_buckets(
    run: RunSource,
    *,
    bucket_cap_mb: float | None = None,
    overlaps: bool = True,
    bus_bytes_per_s: float | None = None,
    latency_ns: float | None = None,
    rank: int | None = None,
) -> BucketSimulation:
    """Predict the step of a DDP run with other buckets, or on another network.

    Args:
        run: A recorded run of `DistributedDataParallel`.
        bucket_cap_mb: MiB at which a bucket is full; None: the recorded buckets.
        overlaps: False: all-reduces begin when backward has computed all gradients.
        bus_bytes_per_s: Bandwidth of another network; None: the run's own.
        latency_ns: Latency of another network; None: the run's own.
        rank: Default: the median rank.

    Raises:
        MissingDataError: As in `measure_buckets`, or the simulation does not describe the run.
        ValueError: The network or the size of buckets is invalid.
    """
    work = measure_buckets(run, rank=rank)
    return predict_buckets(
        work,
        bucket_cap_mb,
        overlaps=overlaps,
        network=work.network.change(bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns),
    )


def predict_buckets(
    work: BucketWork,
    bucket_cap_mb: float | None,
    *,
    overlaps: bool = True,
    network: Network | None = None,
) -> BucketSimulation:
    """Predict a step from measured work, as `simulate_buckets`."""
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"Invalid bucket_cap_mb: {bucket_cap_mb}. Expected a number above 0.")
    network = network or work.network
    buckets = work.recorded if bucket_cap_mb is None else work.assign(bucket_cap_mb)
    replayed = work.simulate(work.recorded)
    error = replayed.step_time_ns / work.step_time_ns - 1
    trust = replace(work.trust, self_check_error=error)
    trust.expect_prediction()
    predicted = work.simulate(buckets, network, overlaps=overlaps)
    steps, gains = [], []
    for before, after in work.paces(network):
        steps.append(work.simulate(buckets, after, overlaps=overlaps).step_time_ns)
        gains.append(work.simulate(work.recorded, before).step_time_ns - steps[-1])
    margin = trust.step_margin()
    gain_margin = trust.gain_margin_ns(max(gains, key=abs), replayed.step_time_ns)
    return BucketSimulation(
        run_id=work.run_id,
        rank=work.rank,
        num_steps=work.num_steps,
        bucket_cap_mb=work.cap_mb if bucket_cap_mb is None else bucket_cap_mb,
        overlaps=overlaps,
        recorded_step_ns=work.step_time_ns,
        recorded_exposed_ns=round(work.exposed_ns),
        replayed=replayed,
        replay_error=error,
        predicted=predicted,
        low_ns=round(min(steps) * max(1 - margin, 0.0)),
        high_ns=round(max(steps) * (1 + margin)),
        change=predicted.step_time_ns / replayed.step_time_ns - 1,
        gain_low_ns=round(min(gains) - gain_margin),
        gain_high_ns=round(max(gains) + gain_margin),
        assumptions=tuple(_assumptions(work, network)),
        caveats=trust.prediction_caveats,
    )


def find_best_buckets(run: RunSource) -> BucketSimulation | None:
    """The size of buckets with the largest certain gain; None: none is certain, or predicted."""
    try:
        work = measure_buckets(run)
        found = [predict_buckets(work, cap_mb) for cap_mb in _CAPS_MB]
    except MissingDataError:
        return None
    best = max(found, key=lambda each: each.gain_low_ns)
    return best if best.gain_low_ns > 0 else None


def _assumptions(work: BucketWork, network: Network) -> Iterable[str]:
    yield (
        "Between the ends of recorded buckets, gradients become ready in proportion to their bytes."
    )
    if work.is_inferred:
        yield (
            "Some all-reduces were queued behind others, so the time at which their buckets were "
            "ready is inferred from the buckets around them."
        )
    yield from unknown_latencies(network)
