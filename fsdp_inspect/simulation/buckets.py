"""Predict a step of DDP or ZeRO with other buckets or messages, from one recorded run.

[Note: The model of buckets]
DDP sums the gradients of a bucket as soon as its last gradient is ready. The all-reduces run beside
backward, in the order of the buckets. NCCL runs one at a time. gloo has several threads, and the
record shows how many of them worked at a time (`count_lanes`). After the last gradient, backward
waits for the remaining all-reduces. The simulation needs

- the time at which each gradient is ready: measured at the ends of the recorded buckets, and
  inferred between them, in proportion to the bytes;
- the duration of an all-reduce of any size: the cost line that is fitted to the run's own ones
  (`simulation.network`).

Each recorded backward of DDP is simulated by itself, with its own times and with its all-reduces
as slow as they were. A wait is the later of several moments, so the wait of a mean backward would
be shorter than the mean wait.

The rest of the step stays as recorded: compute, copies, other collectives, and their waits. The
recorded buckets are simulated too, so that the error of the model is known.

[Note: The buckets of ZeRO-1 and ZeRO-2]
DeepSpeed 0.19 adds each gradient to the open bucket. If the bucket would exceed
`reduce_bucket_size` elements, DeepSpeed reduces it before it adds the gradient. It reduces the last
bucket when backward has ended.

- Without `overlap_comm`, and on CPU, backward stands still during each reduction.
- With `overlap_comm` on a device, backward waits at each reduction for the one before.
- ZeRO-2 reduces every microbatch. ZeRO-1 reduces the last one, and without `overlap_comm` only
  after backward, in the order of the parameters.

Where backward stands still, the duration of an all-reduce contains the wait for the other ranks.
How much of it is the same for any number of buckets is unknown. So the interval includes the case
that all time above the fastest tenth stays. `allgather_bucket_size` changes nothing: the optimizer
gathers each parameter group in one message.

[Note: The buckets of DDP]
torch 2.13 assigns parameters to buckets in the order in which their gradients became ready
(`compute_bucket_assignment_by_size` in reducer.cpp): a bucket of one dtype is full at
`bucket_cap_mb`. With `find_unused_parameters`, it assigns them in the order of the model, and
reduces the buckets in reverse.

On CPU, an all-reduce takes cores from the backward beside it, and is slower than one after it. How
much is unknown, so the interval includes all-reduces as fast as the fastest tenth of the recorded
ones. How much slower several all-reduces at a time are than one is unknown, too. So the interval of
other buckets includes all-reduces of the recorded durations one after the other.

[Note: The messages of ZeRO-3]
`simulation.zero3` gives the messages of a step with any settings, and the hooks that issue them and
wait for them. The time of the host between two hooks stays as recorded. One link sends the messages
in the order of their issue. The recorded messages must equal those of the rules, else the run is
refused.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.last_arrivals import say_waits_that_stay, set_waits_apart
from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.analysis.memory.fit import measure_allocatable
from fsdp_inspect.analysis.shared_collectives import count_lanes
from fsdp_inspect.analysis.step_selection import RankSteps, inspected_rank
from fsdp_inspect.analysis.trust import Trust, measure_trust
from fsdp_inspect.columns import TableSpec, metric_column, unit_column, value_column
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.simulation.network import (
    KINDS,
    CostLine,
    Network,
    Pace,
    fit_network,
    known_lines,
    measure_own_lateness,
    unknown_latencies,
)
from fsdp_inspect.simulation.recorded import with_own_turns
from fsdp_inspect.simulation.zero3 import (
    GatherSettings,
    Messages,
    ShardedParameter,
    entered_modules,
    order_messages,
)
from fsdp_inspect.statistics import half_range_ratio
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    ENTERS,
    ITEMSIZE,
    LEAVES,
    NO_UNIT,
    WAIT_OF,
    EventFlag,
    EventKind,
    Phase,
    UseEvent,
)
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit, UseOrder
from fsdp_inspect.trace.sharders import DDP, ZERO1, ZERO2, ZERO3, ddp_code, traits_of
from fsdp_inspect.trace.tables import EventTable

_MIB = float(1 << 20)
_CAPS_MB = (1, 2, 5, 10, 25, 50, 100, 200, 400, 1000)
_SIZE_OPTIONS = ("--bucket-cap 10", "--reduce-bucket-size 200000000")
"""An example of a size for `simulate`: DDP, ZeRO."""
_MILLIONS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The sizes that `find_best_buckets` tries: MiB of DDP, millions of elements of ZeRO."""
_OF_STAGE = {1: ZERO1, 2: ZERO2, 3: ZERO3}


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """The settings that determine the buckets, and when they are reduced."""

    sharder: str
    size: float
    """DDP: MiB at which a bucket is full. ZeRO: the most elements of a bucket. NaN: unknown."""
    overlaps: bool
    """DDP: whether all-reduces run beside backward. ZeRO: `overlap_comm`."""
    gathers: GatherSettings | None = None
    """ZeRO-3: the settings of gathers."""

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed fills the buckets."""
        return self.sharder != DDP

    @property
    def what(self) -> str:
        """What is simulated: `buckets` of one backward, or `messages` of one step."""
        return "buckets" if self.gathers is None else "messages"

    @property
    def period(self) -> str:
        """What they belong to: `backward` or `the step`."""
        return "backward" if self.gathers is None else "the step"

    @property
    def in_backward(self) -> bool:
        """Whether gradients enter the buckets as they become ready; else after backward."""
        return self.sharder != ZERO1 or self.overlaps

    @property
    def snippet(self) -> str:
        """The settings as code of DDP, or as a part of DeepSpeed's configuration."""
        if not self.is_zero:
            is_known = not math.isnan(self.size)
            return ddp_code("bucket_cap_mb", f"{self.size:g}") if is_known else ""
        stage = next(each for each, name in _OF_STAGE.items() if name == self.sharder)
        size = {} if math.isnan(self.size) else {"reduce_bucket_size": round(self.size)}
        gathers = asdict(self.gathers) if self.gathers else {}
        of_gathers = {f"stage3_{name}": round(value) for name, value in gathers.items()}
        settings = {"stage": stage, **size, **of_gathers, "overlap_comm": self.overlaps}
        return f'"zero_optimization": {json.dumps(settings)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChanges:
    """The settings of buckets to change; None: as recorded."""

    bucket_cap_mb: float | None = None
    """DDP: MiB at which a bucket is full."""
    reduce_bucket_size: float | None = None
    """ZeRO: the most elements of a bucket."""
    zero_stage: int | None = None
    """ZeRO: 1 or 2."""
    overlaps: bool | None = None
    """DDP: False if all-reduces begin when backward has computed all gradients. ZeRO:
    `overlap_comm`."""
    prefetch_bucket_size: float | None = None
    """ZeRO-3: the elements of a prefetch."""
    max_live_parameters: float | None = None
    """ZeRO-3: the gathered elements with which nothing is prefetched."""
    max_reuse_distance: float | None = None
    """ZeRO-3: the elements within which a parameter that is used again stays gathered."""
    param_persistence_threshold: float | None = None
    """ZeRO-3: the most elements of a parameter that stays gathered until the update."""

    @property
    def of_gathers(self) -> dict[str, float]:
        """The changed settings of gathers."""
        found = {each.name: getattr(self, each.name) for each in fields(GatherSettings)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SimulatedBucket:
    """One bucket in a simulated backward, or one message of ZeRO-3 in a simulated step."""

    name: str
    num_tensors: int
    message_bytes: int
    ready_ns: int
    """From the begin of backward until its gradients are ready to be reduced. ZeRO-3: from the
    begin of the step until it is issued, as all times."""
    start_ns: int
    """From the begin of backward until its collective starts."""
    duration_ns: int


@dataclass(frozen=True, slots=True)
class BucketStep:
    """A simulated step with given buckets."""

    step_time_ns: int
    exposed_ns: int
    """Waits for buckets in the step, and of ZeRO-3 for gathers too."""
    communication_ns: int
    """The collectives in the step, with the waits for ranks that work longer."""
    buckets: tuple[SimulatedBucket, ...]
    """The buckets of one backward, or the messages of a step of ZeRO-3, in order."""
    waits: tuple[tuple[int, int], ...] = ()
    """The waits of that backward for all-reduces: start and end of each, from its begin; empty for
    ZeRO-3."""


@dataclass(frozen=True, slots=True)
class BucketSimulation(TableResult):
    """The predicted step of a run with other buckets."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Messages of the plan",
        (
            unit_column("The bucket or the message, in order.", attrgetter("name")),
            value_column(
                "num_tensors", MetricUnit.COUNT, "parameters in the bucket", label="tensors"
            ),
            metric_column("message_bytes", metric="bytes"),
            metric_column("ready_ns", metric="duration_ns", label="ready at"),
            metric_column("start_ns", metric="duration_ns", label="starts at"),
            metric_column("duration_ns"),
        ),
    )

    run_id: str
    rank: int
    num_steps: int
    """The recorded steps behind it."""
    settings: BucketSettings
    """The simulated settings; the size is NaN if it is as recorded, which torch did not log."""
    recorded_step_ns: int
    """Measured: the typical step of the rank."""
    recorded_exposed_ns: int
    """Measured: waits for all-reduces of buckets in these steps."""
    replayed: BucketStep
    """The recorded buckets, simulated."""
    replay_error: float
    """replayed / recorded - 1."""
    predicted: BucketStep
    backwards_per_step: float
    """The backwards of a step, one for each microbatch; 0 for ZeRO-3."""
    low_ns: int
    high_ns: int
    """The interval of the step time, as in `simulation.simulate`."""
    change: float
    """predicted / replayed - 1. Both are simulated, so the error of the self-check cancels."""
    gain_low_ns: int
    gain_high_ns: int
    """The interval of the time that the buckets save in a step; negative: they cost time."""
    added_bytes: int
    """Bytes by which DeepSpeed's buffers for gradients grow, and with ZeRO-3 the most bytes of
    gathered parameters; 0 for DDP and if unknown."""
    assumptions: tuple[str, ...]
    caveats: tuple[str, ...]

    def rows(self) -> Sequence[SimulatedBucket]:
        """One row per bucket of the plan."""
        return self.predicted.buckets


class _Gradient(NamedTuple):
    """The gradient of one parameter."""

    numel: int
    dtype: str
    ready_ns: NDArray[np.float64]
    """From the begin of each simulated backward, without waits in it."""

    @property
    def num_bytes(self) -> int:
        """Its bytes in the message."""
        return self.numel * ITEMSIZE[self.dtype]


class _Backwards(NamedTuple):
    """The recorded backwards of DDP that reduce buckets, or the mean of those of ZeRO."""

    per_step: float
    """Number of these backwards in a step."""
    all_per_step: float
    """Number of all backwards in a step."""
    ready_ns: NDArray[np.float64]
    """Shape (backwards, buckets): from the begin of backward until each bucket is ready, without
    waits in backward; NaN: its all-reduce was queued."""
    ends_ns: NDArray[np.float64]
    """Shape (backwards,): until all gradients are computed, without waits in it."""
    reduces_ns: NDArray[np.float64]
    """Shape (backwards,): the durations of its all-reduces; empty: unknown."""

    @property
    def is_inferred(self) -> bool:
        """Whether the time of some buckets is unknown."""
        return bool(np.isnan(self.ready_ns).any())


@dataclass(frozen=True, kw_only=True)
class MessageWork(ABC):
    """What the recorded steps of one rank show, for any sharder."""

    run_id: str
    rank: int
    num_steps: int
    num_ranks: int
    step_time_ns: int
    exposed_ns: float
    """Waits in a step for what is simulated."""
    settings: BucketSettings
    """The recorded settings."""
    on_host: bool
    """Whether the device is a CPU."""
    buffered_bytes: int
    """Bytes of DeepSpeed's buffer for each element of a bucket; 0: there is no buffer."""
    network: Network
    fastest: float
    """The duration of the fastest tenth of the recorded collectives, / the simulated one."""
    trust: Trust
    recorded: Any
    """The recorded plan: buckets, or messages of ZeRO-3."""
    all_per_step: float = 0.0
    """Number of all backwards in a step; 0: it does not matter."""
    late_ns: int = 0
    """Waits in a step for ranks that work longer, which stay under any plan."""

    @abstractmethod
    def plan_of(self, settings: BucketSettings) -> Any:
        """The plan that torch or DeepSpeed makes with given settings."""

    @abstractmethod
    def simulate(
        self, plan: Any, settings: BucketSettings | None = None, network: Network | None = None
    ) -> BucketStep:
        """Simulate a step with a plan; default with the recorded settings and network."""

    @abstractmethod
    def assumptions(self, settings: BucketSettings, network: Network) -> Iterable[str]:
        """What a prediction assumes, one sentence each."""

    def worst_cases(self, _plan: Any) -> tuple[Self, ...]:
        """The work with which a plan may be slower; empty: there is no doubt."""
        return ()

    def held_bytes(self, plan: Any, settings: BucketSettings) -> int:
        """The bytes of DeepSpeed's buffers for gradients: one, or two with `overlap_comm`."""
        if math.isnan(settings.size) or math.isnan(self.settings.size):
            return 0
        return round(settings.size) * self.buffered_bytes * (2 if settings.overlaps else 1)

    def paces(self, network: Network) -> list[tuple[Network, Network, float]]:
        """The ends of the uncertainty: the networks of the recorded buckets and of the plan.

        The error of the line is in both, so a gain compares equal paces. Contention on a CPU is
        not: the recorded all-reduces had it, and those of the plan may be free of it. The third
        value is a wait in each step that stays under the plan.
        """
        found = [
            (self.network.at(pace), network.at(pace), 0.0)
            for pace in (Pace.FAST, Pace.TYPICAL, Pace.SLOW)
        ]
        if self.fastest < 1:
            lines = {
                kind: CostLine(line.latency_ns * self.fastest, line.bus_bytes_per_s / self.fastest)
                for kind, line in network.lines.items()
            }
            own_ns = self.exposed_ns - self.late_ns
            stays = own_ns * (1 - self.fastest) if self.settings.is_zero else 0.0
            fast = replace(network, lines=lines)
            found.append((self.network.at(Pace.TYPICAL), fast, stays))
        return found


@dataclass(frozen=True, kw_only=True)
class BucketWork(MessageWork):
    """What the recorded steps show of buckets; see [Note: The model of buckets]."""

    backwards_per_step: float
    """Number of backwards in a step that reduce buckets."""
    computes_ns: NDArray[np.float64]
    """From the begin of each backward until all gradients are computed, without waits in it."""
    slowdowns: NDArray[np.float64]
    """The duration of the all-reduces of each backward, / that of their cost line."""
    gradients: tuple[_Gradient, ...]
    """In the order in which they enter the recorded buckets."""
    lanes: int
    """The all-reduces that run at a time: gloo has several threads."""
    is_inferred: bool
    """Whether the time of some recorded buckets is inferred."""
    in_model_order: bool
    """Whether torch assigns the parameters in the order of the model."""

    def simulate(
        self,
        plan: Sequence[Sequence[int]],
        settings: BucketSettings | None = None,
        network: Network | None = None,
    ) -> BucketStep:
        """Simulate a step with given buckets, each a list of gradients; default as recorded."""
        settings = settings or self.settings
        line = (network or self.network).lines[EventKind.ALL_REDUCE]
        factor = bus_factor(EventKind.ALL_REDUCE, self.num_ranks)
        ready_ns = self._ready_ns(plan, settings)
        # Without overlap, DDP's all-reduces begin when backward has ended.
        free_from = 0.0 if settings.is_zero or settings.overlaps else self.computes_ns
        is_behind = settings.is_zero and settings.overlaps and not self.on_host
        end = blocked = np.zeros(len(self.slowdowns))
        lanes = np.zeros((self.lanes, len(self.slowdowns)))
        found, waits = [], []
        for place, (members, ready) in enumerate(zip(plan, ready_ns, strict=True)):
            size = sum(self.gradients[each].num_bytes for each in members)
            ready = ready + blocked
            start = np.maximum(np.maximum(lanes[0], ready), free_from)
            durations = line.duration_ns(size, factor) * self.slowdowns
            lanes[0] = start + durations
            lanes.sort(axis=0)
            end = lanes[-1].copy()
            if settings.is_zero:
                waits.append((ready, start if is_behind else end))
                blocked = blocked + waits[-1][1] - ready
            times = (round(float(each.mean())) for each in (ready, start, durations))
            found.append(SimulatedBucket(f"bucket {place}", len(members), size, *times))
        waits.append((self.computes_ns + blocked, np.maximum(end, self.computes_ns + blocked)))
        means = [(round(float(a.mean())), round(float(b.mean()))) for a, b in waits]
        per_step = self._backwards_per_step(settings)
        exposed = float(np.maximum(end - self.computes_ns, 0.0).mean()) * per_step
        return BucketStep(
            step_time_ns=round(self.step_time_ns - self.exposed_ns + exposed) + self.late_ns,
            exposed_ns=round(exposed) + self.late_ns,
            communication_ns=round(per_step * sum(b.duration_ns for b in found)) + self.late_ns,
            buckets=tuple(found),
            waits=tuple((first, last) for first, last in means if last > first),
        )

    def worst_cases(self, plan: Any) -> tuple[Self, ...]:
        """All-reduces of other buckets one after the other; see [Note: The buckets of DDP]."""
        is_known = self.lanes == 1 or [*map(tuple, plan)] == [*map(tuple, self.recorded)]
        return () if is_known else (replace(self, lanes=1),)

    def _ready_ns(
        self, buckets: Sequence[Sequence[int]], settings: BucketSettings
    ) -> list[NDArray[np.float64]]:
        """The time at which each bucket is handed to the network, without waits in backward."""
        if not settings.is_zero:
            ready = [[self.gradients[each].ready_ns for each in members] for members in buckets]
            return [np.max(each, axis=0) for each in ready]
        if not settings.in_backward:
            return [self.computes_ns] * len(buckets)
        # The first gradient of the next bucket does not fit.
        return [*(self.gradients[each[0]].ready_ns for each in buckets[1:]), self.computes_ns]

    def _backwards_per_step(self, settings: BucketSettings) -> float:
        """Number of backwards in a step that reduce buckets with given settings."""
        if settings.sharder == self.settings.sharder:
            return self.backwards_per_step
        return 1.0 if settings.sharder == ZERO1 else self.all_per_step

    def plan_of(self, settings: BucketSettings) -> Any:
        """The recorded buckets if no setting changes them, or those of the settings."""
        recorded = self.settings
        if (settings.size, settings.in_backward) == (recorded.size, recorded.in_backward):
            return self.recorded
        if math.isnan(settings.size):
            if not settings.is_zero or settings.in_backward == recorded.in_backward:
                return self.recorded
            raise MissingDataError(
                f"The run {self.run_id!r} has no reduce_bucket_size, so the buckets in another "
                "order are unknown. Expected the size. Set it too (--reduce-bucket-size)."
            )
        return self.assign(settings)

    def assign(self, settings: BucketSettings) -> list[list[int]]:
        """The buckets that torch or DeepSpeed makes with given settings."""
        full: list[list[int]] = []
        open_: dict[str, list[int]] = {}
        sizes: Counter[str] = Counter()
        places = range(len(self.gradients))
        is_reversed = self.in_model_order or settings.in_backward != self.settings.in_backward
        for at in reversed(places) if is_reversed else places:
            dtype = self.gradients[at].dtype
            size = self.gradients[at].numel if settings.is_zero else self.gradients[at].num_bytes
            if settings.is_zero and dtype in open_ and sizes[dtype] + size > settings.size:
                full.append(open_.pop(dtype))
                sizes[dtype] = 0
            open_.setdefault(dtype, []).append(at)
            sizes[dtype] += size
            if not settings.is_zero and sizes[dtype] >= settings.size * _MIB:
                full.append(open_.pop(dtype))
                sizes[dtype] = 0
        full += open_.values()
        return full[::-1] if self.in_model_order else full

    def assumptions(self, settings: BucketSettings, network: Network) -> Iterable[str]:
        """What a prediction assumes, one sentence each."""
        recorded = self.settings
        if not settings.is_zero:
            yield (
                "Between the ends of recorded buckets, gradients become ready in proportion to "
                "their bytes."
            )
        if self.lanes > 1:
            yield (
                f"{self.lanes} all-reduces run at a time, as recorded. How much slower they make "
                "each other is unknown, so the interval of other buckets includes all-reduces one "
                "after the other."
            )
        if settings.is_zero and settings.overlaps and not self.on_host:
            yield (
                "Backward waits at each reduction for the one before, as in DeepSpeed 0.19. No run "
                "on a GPU was compared with the prediction."
            )
        elif settings.is_zero and settings.overlaps:
            yield "On CPU, DeepSpeed's reductions block backward with overlap_comm, too."
        if settings.in_backward != recorded.in_backward:
            yield "Gradients become ready in the reverse order of the parameters."
        if settings.sharder != recorded.sharder:
            yield (
                "ZeRO-2 reduces the gradients of each microbatch, and ZeRO-1 those of the last "
                "one. The other work of the engine stays as recorded."
            )
        largest = max(each.numel for each in self.gradients)
        if settings.is_zero and largest > settings.size:
            yield (
                f"A parameter with more elements than a bucket ({largest:,}) is reduced in one "
                "message. DeepSpeed splits it if two ranks own it."
            )
        if self.is_inferred:
            yield (
                "Some all-reduces were queued behind others, so the time at which their buckets "
                "were ready is inferred from the buckets around them."
            )
        reduces = EventKind.ALL_REDUCE
        yield from unknown_latencies(replace(network, lines={reduces: network.lines[reduces]}))


@dataclass(frozen=True, kw_only=True)
class FetchWork(MessageWork):
    """What the recorded steps show of ZeRO-3; see [Note: The messages of ZeRO-3]."""

    uses: UseOrder
    parameters: tuple[ShardedParameter, ...]
    """The parameters by number."""
    names: tuple[str, ...]
    """The unit of each parameter."""
    positions_ns: tuple[float, ...]
    """From the begin of the step to each event of `uses`, and to the update, without waits."""
    scatters: bool
    """Whether gradients are reduce-scattered."""

    def plan_of(self, settings: BucketSettings) -> Messages:
        """The messages that DeepSpeed makes with given settings."""
        assert settings.gathers is not None
        found = order_messages(
            self.uses, self.parameters, settings.gathers, settings.size, scatters=self.scatters
        )
        if found is None:
            raise MissingDataError(
                f"The messages of run {self.run_id!r} with these settings differ from step to "
                "step, so no step represents the others. Expected equal steps. Choose others."
            )
        missing = {each.kind for each in found.messages} - self.network.lines.keys()
        if missing:
            name = next(iter(missing)).label.replace("_", "-")
            raise MissingDataError(
                f"Run {self.run_id!r} has no {name}, so the duration of one is unknown. Expected "
                "one. Choose a larger reduce_bucket_size."
            )
        return found

    def simulate(
        self, plan: Messages, settings: BucketSettings | None = None, network: Network | None = None
    ) -> BucketStep:
        """Simulate a step with given messages; its settings have no other effect."""
        lines = (network or self.network).lines
        waited = free = 0.0
        ends: dict[int, float] = {}
        found = []
        for place, number, is_wait in plan.actions:
            now = self.positions_ns[place] + waited
            if is_wait:
                waited += max(ends[number] - now, 0.0)
                continue
            message = plan.messages[number]
            start = max(now, free)
            factor = bus_factor(message.kind, self.num_ranks)
            duration = lines[message.kind].duration_ns(message.num_bytes, factor)
            ends[number] = free = start + duration
            name = f"{message.kind.label.replace('_', '-')} of {self.names[message.parameters[0]]}"
            sizes = (len(message.parameters), message.num_bytes)
            found.append(SimulatedBucket(name, *sizes, round(now), round(start), duration))
        return BucketStep(
            step_time_ns=round(self.step_time_ns - self.exposed_ns + waited) + self.late_ns,
            exposed_ns=round(waited) + self.late_ns,
            communication_ns=sum(each.duration_ns for each in found) + self.late_ns,
            buckets=tuple(found),
        )

    def held_bytes(self, plan: Messages, settings: BucketSettings) -> int:
        """One buffer of gradients, and the most bytes of gathered parameters."""
        return round(settings.size) * self.buffered_bytes + plan.most_bytes

    def assumptions(self, settings: BucketSettings, network: Network) -> Iterable[str]:
        """What a prediction assumes, one sentence each."""
        yield "The work on the host between the hooks of DeepSpeed stays as recorded."
        if settings.overlaps != self.settings.overlaps:
            yield "On CPU, overlap_comm changes nothing: reductions block backward."
        yield from unknown_latencies(network)


def measure_buckets(run: RunSource, *, rank: int | None = None) -> MessageWork:
    """Measure the messages of a run of DDP, or of ZeRO-1 to ZeRO-3.

    Args:
        run: A recorded run of one of them.
        rank: Default: the median rank.

    Raises:
        MissingDataError: The run is of another sharder, or its steps do not show messages
            that the model describes.
    """
    manifest = run.manifest
    if manifest.sharder == ZERO3:
        return _measure_fetches(run, rank)
    if not manifest.sharder_traits.has_messages:
        raise MissingDataError(
            f"Run {manifest.run_id!r} has no buckets: it uses {manifest.sharder_traits.title}. "
            "Expected a run of DistributedDataParallel, or of ZeRO-1 to ZeRO-3."
        )
    settings, on_host = _settings_of(manifest), manifest.device_type == "cpu"
    units = [unit for unit in manifest.units if unit.num_tensors]
    member = inspected_rank(run, rank)
    if member is None or not units:
        raise MissingDataError(_refuse(run, "it has no timed step with buckets"))
    events = run.events(member.rank, steps=member.typical_steps.tolist())
    sent = events.where(np.isin(events.kind, list(COLLECTIVES)))
    lanes = count_lanes(sent) if on_host and not settings.is_zero else 1
    build = partial(_build_buckets, run, member, units, lanes)
    return _set_waits_apart(run, member, with_own_turns(events, lanes), build)


_Work = TypeVar("_Work", bound=MessageWork)


def _set_waits_apart(
    run: RunSource, member: RankSteps, events: EventTable, build: Callable[[EventTable], _Work]
) -> _Work:
    """Build the work without the waits for ranks that work longer; they become a part of its own.

    See [Note: waits that stay] in `analysis.last_arrivals`.
    """
    if run.manifest.device_type != "cpu":
        return build(events)  # there, the start of a collective shows when its bucket was ready
    shortened, late_ns = set_waits_apart(run, member, events, is_blocking=False)
    return replace(build(shortened), late_ns=late_ns)


def _build_buckets(
    run: RunSource, member: RankSteps, units: Sequence[Unit], lanes: int, events: EventTable
) -> BucketWork:
    manifest, steps = run.manifest, member.typical_steps
    settings, on_host = _settings_of(manifest), manifest.device_type == "cpu"
    backwards = _measure_backwards(events, units, len(steps), settings, on_host=on_host)
    if backwards is None:
        why = "its backwards do not reduce every bucket once, in the same order"
        if settings.is_zero and _largest(units) > settings.size:
            why = (
                "a parameter is larger than a bucket, and DeepSpeed reduces it in several messages"
            )
        raise MissingDataError(_refuse(run, why))
    network = _network_of(run, member.rank, events)
    if EventKind.ALL_REDUCE not in network.lines:
        raise MissingDataError(_refuse(run, "no all-reduce of a bucket was timed"))
    reduced = _of_buckets(events, EventKind.ALL_REDUCE)
    waits = _of_buckets(events, EventKind.ALL_REDUCE_WAIT)
    num_ranks = _ranks_in(manifest, units[0].replicate_group)
    observed = manifest.observed
    searches = observed.get("find_unused_parameters") == "True"
    in_model_order = searches and observed.get("static_graph") != "True"
    gradients, recorded = _spread_gradients(units, backwards, settings, in_model_order)
    expected_ns = _expected_ns(reduced, network, num_ranks).sum()
    known = backwards.reduces_ns
    slowdowns = known * len(known) / expected_ns if len(known) else np.ones(1)
    work = BucketWork(
        run_id=manifest.run_id,
        rank=member.rank,
        num_steps=len(steps),
        num_ranks=num_ranks,
        step_time_ns=member.typical(member.step_time_ns),
        exposed_ns=float((waits.end_ns - waits.start_ns).sum()) / len(steps),
        backwards_per_step=backwards.per_step,
        all_per_step=backwards.all_per_step,
        computes_ns=backwards.ends_ns,
        gradients=gradients,
        recorded=recorded,
        settings=settings,
        on_host=on_host,
        buffered_bytes=_buffered_bytes(manifest, (ITEMSIZE[unit.reduce_dtype] for unit in units)),
        slowdowns=slowdowns,
        lanes=lanes,
        is_inferred=backwards.is_inferred,
        in_model_order=in_model_order,
        network=network,
        fastest=_fastest(reduced, network, num_ranks) / float(slowdowns.mean())
        if (on_host or settings.is_zero) and manifest.source != "emulated"
        else 1.0,
        trust=_trust_of(run, member, network),
    )
    is_known = settings.is_zero and not math.isnan(settings.size)
    if is_known and [*map(tuple, work.assign(settings))] != [*recorded]:
        size = f"{settings.size:,.0f}"
        raise MissingDataError(
            _refuse(run, f"its buckets are not those of reduce_bucket_size {size}")
        )
    return work


def _measure_fetches(run: RunSource, rank: int | None) -> FetchWork:
    """Measure the steps of a run of ZeRO-3; raises as `measure_buckets`."""
    manifest = run.manifest
    settings = _settings_of(manifest)
    num_ranks = _ranks_in(manifest, next((unit.shard_group for unit in manifest.units), -1))
    parameters = tuple(_parameters_of(manifest.units, num_ranks))
    member, why = inspected_rank(run, rank), _why_no_order(manifest, settings, len(parameters))
    uses = manifest.uses
    if why or uses is None or member is None:
        raise MissingDataError(_refuse(run, why or "it has no timed step"))
    events = with_own_turns(run.events(member.rank, steps=member.typical_steps.tolist()))
    build = partial(_build_fetches, run, member, uses, parameters)
    return _set_waits_apart(run, member, events, build)


def _build_fetches(
    run: RunSource,
    member: RankSteps,
    uses: UseOrder,
    parameters: tuple[ShardedParameter, ...],
    events: EventTable,
) -> FetchWork:
    manifest, observed = run.manifest, run.manifest.observed
    settings, steps = _settings_of(manifest), member.typical_steps
    num_ranks = _ranks_in(manifest, next((unit.shard_group for unit in manifest.units), -1))
    own = [events.where(events.step == step) for step in steps]
    rows_of = _rows_of(uses)
    found = [_positions_in(each, uses, rows_of) for each in own]
    if any(each is None for each in found):
        why = "the passes of its modules are not those of its order of uses"
        raise MissingDataError(_refuse(run, why))
    network = _network_of(run, member.rank, events)
    waits = [_waits_in(each) for each in own]
    work = FetchWork(
        run_id=manifest.run_id,
        rank=member.rank,
        num_steps=len(steps),
        num_ranks=num_ranks,
        step_time_ns=member.typical(member.step_time_ns),
        exposed_ns=sum(float((ends - starts).sum()) for starts, ends in waits) / len(steps),
        settings=settings,
        on_host=True,
        buffered_bytes=_buffered_bytes(manifest, (each.reduce_itemsize for each in parameters)),
        network=network,
        fastest=_fastest(_own(events, KINDS), network, num_ranks),
        trust=_trust_of(run, member, network),
        recorded=Messages((), (), 0),
        uses=uses,
        parameters=parameters,
        names=tuple(unit.fqn for unit in manifest.units for _ in unit.parameters),
        positions_ns=_fill(np.mean(np.array(found), axis=0), uses),
        scatters=observed.get("reduce_scatter") == "True",
    )
    recorded = work.plan_of(settings)
    expected = [(each.kind, each.num_bytes) for each in recorded.messages]
    for seen in (_own(each, KINDS) for each in own):
        if [*zip(seen.kind.tolist(), seen.bytes.tolist(), strict=True)] != expected:
            raise MissingDataError(_refuse(run, "its messages are not those of DeepSpeed's rules"))
    return replace(work, recorded=recorded)


def _buffered_bytes(manifest: RunManifest, sizes: Iterable[int]) -> int:
    """Bytes of DeepSpeed's buffer for each element of a bucket; 0: gradients are not copied."""
    return max(sizes) if manifest.observed.get("contiguous_gradients") == "True" else 0


def _why_no_order(manifest: RunManifest, settings: BucketSettings, num_parameters: int) -> str:
    """Why the manifest does not show what each step does; empty: it does."""
    uses = manifest.uses
    if manifest.device_type != "cpu":
        return "on a GPU, the ends of its hidden gathers are unknown, and the host runs ahead"
    if uses is None:
        return "it lacks the order of uses, which this version records if steps are equal"
    sizes = (settings.size, *asdict(settings)["gathers"].values())
    if any(map(math.isnan, sizes)) or not _is_whole(uses, num_parameters):
        return "its settings or its order of uses are incomplete"
    passes = entered_modules(uses)
    return "" if all(each == passes[0] for each in passes) else "its microbatches run other modules"


def _parameters_of(units: Iterable[Unit], num_ranks: int) -> Iterable[ShardedParameter]:
    for unit in units:
        sizes = ITEMSIZE.get(unit.param_dtype, 0), ITEMSIZE.get(unit.reduce_dtype, 0)
        for shape in unit.parameters.values():
            numel = math.prod(shape)
            padded = -(-numel // num_ranks) * num_ranks
            yield ShardedParameter(numel, padded, sizes[0], unit.reduce_dtype, sizes[1])


def _is_whole(uses: UseOrder, num_parameters: int) -> bool:
    """Whether an order begins with a forward, and names existing modules and parameters only."""
    used = [number for module in uses.modules for number in module.parameters]
    used += [number for event, number, _ in uses.events if event == UseEvent.GRADIENT]
    entered = [number for event, number, _ in uses.events if event in (*ENTERS, *LEAVES)]
    begins = bool(uses.events) and uses.events[0][0] == UseEvent.BEGIN
    return (
        begins and max(used, default=0) < num_parameters
        and max(entered, default=0) < len(uses.modules)
    )  # fmt: skip


def _own(events: EventTable, kinds: Iterable[int]) -> EventTable:
    """The events of units of some kinds, in the order of their issue."""
    found = events.where(np.isin(events.kind, list(kinds)) & (events.unit != NO_UNIT))
    return found.where(np.lexsort((found.sequence, found.issue_ns)))


def _rows_of(uses: UseOrder) -> list[int]:
    """For each event, the begin or the entry of a module whose row has its time; -1: none.

    A repeated forward can have no end and no row: torch stops it when all activations are known. A
    backward without an end has a row that ends with the backward of the model.
    """
    found = [-1] * len(uses.events)
    entered: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for at, (event, number, _) in enumerate(uses.events):
        if event == UseEvent.BEGIN:
            found[at] = at
        elif event in ENTERS and uses.modules[number].unit != NO_UNIT:
            entered[event, number].append(at)
            if event == UseEvent.ENTER_BACKWARD:
                found[at] = at
        elif event in LEAVES and (own := entered[ENTERS[LEAVES.index(event)], number]):
            found[at] = found[own[-1]] = own[-1]
            own.pop()
    return found


def _positions_in(
    events: EventTable, uses: UseOrder, rows_of: Sequence[int]
) -> NDArray[np.float64] | None:
    """The time of each event in a step without waits, and that of its end; NaN: it has no row.

    None if the rows of the step do not follow the order.
    """
    is_own = (events.unit != NO_UNIT) & (events.kind == EventKind.BACKWARD)
    is_own |= (events.kind == EventKind.FORWARD) & (events.phase != Phase.EVALUATION)
    rows = events.where(is_own)
    left: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
    for unit, *span in sorted(
        zip(rows.unit.tolist(), rows.start_ns.tolist(), rows.end_ns.tolist(), strict=True)
    ):
        left[unit].append((span[0], span[1]))
    spans: dict[int, tuple[int, int]] = {}
    times = []
    for at, row in enumerate(rows_of):
        if row == at:
            event, number, _ = uses.events[at]
            own = left[NO_UNIT if event == UseEvent.BEGIN else uses.modules[number].unit]
            if not own:
                return None
            spans[at] = own.popleft()
        times.append(math.nan if row < 0 else spans[row][row != at])
    step = events.where(events.kind == EventKind.STEP)
    if any(left.values()) or not len(step):
        return None
    found = np.array([*times, step.end_ns[0]], np.float64)
    starts, ends = _waits_in(events)
    done = np.concatenate(([0], np.cumsum(ends - starts)))
    begun = np.searchsorted(starts, found, side="right")
    left_ns = np.maximum(np.concatenate(([0], ends))[begun] - found, 0)
    positions: NDArray[np.float64] = found - step.start_ns[0] - done[begun]
    return positions + np.where(begun > 0, left_ns, 0)


def _waits_in(events: EventTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and end of the disjoint waits for messages of units, in order.

    A gather that its own hook waits for delays the host from its issue on.
    """
    waits, gathers = _own(events, WAIT_OF.values()), _own(events, [EventKind.ALL_GATHER])
    is_ahead = (gathers.flags & EventFlag.PREFETCHED) != 0
    own = gathers.where(~is_ahead | (gathers.phase == Phase.OPTIMIZER))
    issues = dict(zip(own.collective.tolist(), own.issue_ns.tolist(), strict=True))
    pairs = zip(waits.collective.tolist(), waits.start_ns.tolist(), strict=True)
    starts = np.array([issues.get(number, start) for number, start in pairs], np.int64)
    order = np.argsort(starts, kind="stable")
    ends = np.maximum.accumulate(waits.end_ns[order])
    return np.maximum(starts[order], np.concatenate(([0], ends[:-1]))), ends


def _fill(known_ns: NDArray[np.float64], uses: UseOrder) -> tuple[float, ...]:
    """The time of each event; one without a row follows the event before it."""
    following = np.minimum.accumulate(np.where(np.isnan(known_ns), np.inf, known_ns)[::-1])[::-1]
    found: list[float] = []
    for at, time in enumerate(known_ns.tolist()):
        before = found[-1] if found else 0.0
        if math.isnan(time):
            time = min(before + uses.events[at][2], float(following[at]))
        found.append(max(time, before))
    return tuple(found)


def _ranks_in(manifest: RunManifest, group: int) -> int:
    """The number of ranks in a process group."""
    ranks = next((each.ranks for each in manifest.process_groups if each.index == group), ())
    return len(ranks) or manifest.world_size


def _network_of(run: RunSource, rank: int, events: EventTable) -> Network:
    fitted = fit_network(events, run.manifest.process_groups, known_lines(run))
    return replace(fitted, late_ratio=measure_own_lateness(run, rank, events))


def _trust_of(run: RunSource, member: RankSteps, network: Network) -> Trust:
    times = member.step_time_ns[member.is_typical].tolist()
    spread = half_range_ratio(times)
    ratio = network.unexplained_ratio
    found = measure_trust(run)
    return replace(found, spread_ratio=spread, num_steps=len(times), network_ratio=ratio)


def _largest(units: Iterable[Unit]) -> int:
    """The elements of the largest parameter."""
    shapes = (shape for unit in units for shape in unit.parameters.values())
    return max(map(math.prod, shapes), default=0)


def _settings_of(manifest: RunManifest) -> BucketSettings:
    observed = manifest.observed
    if manifest.sharder == DDP:
        return BucketSettings(DDP, _number(observed.get("bucket_cap_mb")), overlaps=True)
    size, overlaps = observed.get("reduce_bucket_size"), observed.get("overlap_comm") == "True"
    gathers = None
    if manifest.sharder == ZERO3:
        names = (each.name for each in fields(GatherSettings))
        gathers = GatherSettings(**{name: _number(observed.get(name)) for name in names})
    return BucketSettings(manifest.sharder, _number(size), overlaps, gathers)


def _fastest(rows: EventTable, network: Network, num_ranks: int) -> float:
    """The duration of the fastest tenth of some collectives, / that of their cost line."""
    expected = _expected_ns(rows, network, num_ranks)
    return float(np.percentile((rows.end_ns - rows.start_ns) / expected, 10))


def _expected_ns(rows: EventTable, network: Network, num_ranks: int) -> NDArray[np.float64]:
    """The duration of each collective on its cost line, at least 1 ns."""
    found = [
        network.duration_ns(EventKind(kind), size, num_ranks) or 1
        for kind, size in zip(rows.kind.tolist(), rows.bytes.tolist(), strict=True)
    ]
    return np.maximum(np.array(found, np.float64), 1.0)


def _number(text: str | None) -> float:
    """The number of a setting; NaN: unknown."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _refuse(run: RunSource, why: str) -> str:
    what = "buckets"
    expected = (
        "model with DistributedDataParallel and no communication hook, or of one DeepSpeed engine "
        "with ZeRO-1 or ZeRO-2"
    )
    if run.manifest.sharder == ZERO3:
        what, expected = "messages", "DeepSpeed engine with ZeRO-3 on CPU"
    return (
        f"The {what} of run {run.manifest.run_id!r} cannot be simulated: {why}. Expected timed "
        f"steps of one {expected}. `fsdp-inspect show RUN exposed` shows the measured waits."
    )


def _of_buckets(events: EventTable, kind: EventKind) -> EventTable:
    return events.where(
        (events.kind == kind) & (events.phase == Phase.BACKWARD) & (events.unit >= 0)
    )


def _measure_backwards(
    events: EventTable,
    units: Sequence[Unit],
    num_steps: int,
    settings: BucketSettings,
    *,
    on_host: bool,
) -> _Backwards | None:
    """The backwards; None if they do not reduce every bucket once, in order."""
    begun = events.where(events.kind == EventKind.BACKWARD)
    begins = dict(zip(_keys(begun), begun.start_ns.tolist(), strict=True))
    reduced = _of_buckets(events, EventKind.ALL_REDUCE)
    waits = _of_buckets(events, EventKind.ALL_REDUCE_WAIT)
    keys = _keys(reduced)
    order = np.lexsort((reduced.issue_ns, reduced.microbatch, reduced.step))
    count = len({*keys})
    expected = np.tile([unit.index for unit in units], count)
    if not count or not np.array_equal(reduced.unit[order], expected):
        return None
    if len(begins) != len(begun) or not {*keys} <= {*begins}:
        return None
    since = np.array([begins[key] for key in keys])[order].reshape(count, -1)
    per_step, all_per_step = count / num_steps, len(begins) / num_steps
    if settings.is_zero:
        turns = np.lexsort((waits.start_ns, waits.microbatch, waits.step))
        if not np.array_equal(waits.unit[turns], expected):
            return None
        waited = (waits.end_ns - waits.start_ns)[turns].reshape(count, -1)
        begun_ns = waits.start_ns[turns].reshape(count, -1) - since
        mean = (begun_ns - (waited.cumsum(axis=1) - waited)).mean(axis=0)
        ends_ns = mean[-1:]
        if settings.overlaps and not on_host:  # the wait for a bucket begins at the next one
            first = (reduced.start_ns[order].reshape(count, -1) - since)[:, 0].mean()
            mean = np.concatenate(([first], mean[:-1]))
        return _Backwards(per_step, all_per_step, mean[None], ends_ns, np.empty(0))
    ready = (reduced.issue_ns if on_host else reduced.start_ns)[order].reshape(count, -1) - since
    is_queued = np.zeros(len(units), bool)
    if not on_host:  # a queued all-reduce does not show when its bucket was ready
        ends = reduced.end_ns[order].reshape(count, -1) - since
        is_queued[1:] = np.mean(ready[:, 1:] <= ends[:, :-1], axis=0) > 0.5
    first_wait: dict[tuple[int, int], int] = {}
    for key, start in zip(_keys(waits), waits.start_ns.tolist(), strict=True):
        first_wait[key] = min(start, first_wait.get(key, start))
    if {*first_wait} != {*keys}:
        return None
    ends = np.array([first_wait[key] - begins[key] for key in sorted({*keys})], np.float64)
    lasted = (reduced.end_ns - reduced.start_ns)[order].reshape(count, -1).sum(axis=1)
    ready = np.where(is_queued, np.nan, ready)
    return _Backwards(per_step, all_per_step, ready, ends, lasted.astype(np.float64))


def _keys(events: EventTable) -> list[tuple[int, int]]:
    """The backward of each row: step and microbatch."""
    return list(zip(events.step.tolist(), events.microbatch.tolist(), strict=True))


def _spread_gradients(
    units: Sequence[Unit], backwards: _Backwards, settings: BucketSettings, in_model_order: bool
) -> tuple[tuple[_Gradient, ...], tuple[tuple[int, ...], ...]]:
    """The gradients in the order in which they are ready, and those of each recorded bucket."""
    own = [
        (math.prod(shape), unit.reduce_dtype)
        for unit in units
        for shape in list(unit.parameters.values())[:: -1 if in_model_order else 1]
    ]
    counts = [len(unit.parameters) for unit in units]
    bytes_ready = np.cumsum([numel * ITEMSIZE[dtype] for numel, dtype in own])
    shown = np.cumsum(counts) - 1  # the gradients whose time the buckets show
    if settings.is_zero:
        shown = np.minimum(shown + 1, len(own) - 1)
    is_known = ~np.isnan(backwards.ready_ns[0])
    known_bytes, known_ns = bytes_ready[shown][is_known], backwards.ready_ns[:, is_known]
    if not settings.in_backward:  # the gradients are ready in the reverse order of the buckets
        known_bytes, known_ns = bytes_ready[-1:], backwards.ends_ns[:, None]
        bytes_ready = bytes_ready[-1] - np.concatenate(([0], bytes_ready[:-1]))
    ready = np.transpose([
        np.interp(bytes_ready, [0.0, *known_bytes], [0.0, *np.maximum.accumulate(each)])
        for each in known_ns
    ])  # fmt: skip
    gradients = tuple(_Gradient(*each, at) for each, at in zip(own, ready, strict=True))
    firsts = [0, *accumulate(counts)]
    return gradients, tuple(tuple(range(*span)) for span in pairwise(firsts))


def simulate_buckets(
    run: RunSource,
    changes: BucketChanges,
    *,
    bus_bytes_per_s: float | None = None,
    latency_ns: float | None = None,
    rank: int | None = None,
) -> BucketSimulation:
    """Predict the step of a run with other buckets, or on another network.

    Args:
        run: A recorded run of `DistributedDataParallel`, ZeRO-1 or ZeRO-2.
        changes: The settings to change.
        bus_bytes_per_s: Bandwidth of another network; None: the run's own.
        latency_ns: Latency of another network; None: the run's own.
        rank: Default: the median rank.

    Raises:
        MissingDataError: As in `measure_buckets`, or the simulation does not describe the run.
        PlanError: A setting is of another sharder than the run's.
        ValueError: The network or the size of buckets is invalid.
    """
    work = measure_buckets(run, rank=rank)
    return change_buckets(work, changes, bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns)


def change_buckets(
    work: MessageWork,
    changes: BucketChanges,
    *,
    bus_bytes_per_s: float | None = None,
    latency_ns: float | None = None,
) -> BucketSimulation:
    """As `simulate_buckets`, from measured work, which many simulations of a run share."""
    title, is_zero = traits_of(work.settings.sharder).title, work.settings.is_zero
    is_of_zero_3 = work.settings.gathers is not None
    of_zero = {changes.reduce_bucket_size, changes.zero_stage} != {None}
    is_foreign = (changes.bucket_cap_mb is not None) if is_zero else of_zero
    if is_foreign or (changes.of_gathers and not is_of_zero_3):
        expected = "--reduce-bucket-size or --zero-stage" if is_zero else "--bucket-cap"
        if is_of_zero_3:
            expected = "--reduce-bucket-size, or a setting of gathers"
        raise PlanError(
            f"The buckets of run {work.run_id!r} have other settings: it uses {title}. Expected "
            f"{expected}."
        )
    return predict_buckets(
        work,
        changes.reduce_bucket_size if is_zero else changes.bucket_cap_mb,
        zero_stage=changes.zero_stage,
        overlaps=changes.overlaps,
        gathers=changes.of_gathers,
        network=work.network.change(bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns),
    )


def predict_buckets(
    work: MessageWork,
    size: float | None = None,
    *,
    zero_stage: int | None = None,
    overlaps: bool | None = None,
    gathers: Mapping[str, float] | None = None,
    network: Network | None = None,
) -> BucketSimulation:
    """Predict a step from measured work, as `simulate_buckets`; `size` is in the sharder's unit."""
    if size is not None and not 0 < size < math.inf:
        name = "reduce_bucket_size" if work.settings.is_zero else "bucket_cap_mb"
        raise ValueError(f"Invalid {name}: {size}. Expected a number above 0.")
    for name, value in (gathers or {}).items():
        if not value >= 0:
            raise ValueError(f"Invalid {name}: {value}. Expected a number of at least 0.")
    if work.settings.gathers is not None and zero_stage not in (None, 3):
        raise PlanError(
            f"Invalid ZeRO stage: {zero_stage}. Expected 3: a run of ZeRO-3 does not show the "
            "update of other stages, which gathers the parameters. Record a run with that stage."
        )
    if zero_stage not in (None, 1, 2) and work.settings.gathers is None:
        raise PlanError(
            f"Invalid ZeRO stage: {zero_stage}. Expected 1 or 2. ZeRO-3 gathers parameters in "
            "forward and backward, which this run does not show: record a run with it."
        )
    network = network or work.network
    if work.settings.is_zero and overlaps and not (work.on_host or work.settings.in_backward):
        raise MissingDataError(
            f"Run {work.run_id!r} does not show when gradients are ready: without overlap_comm, "
            "ZeRO-1 reduces them after backward. Expected a run of ZeRO-2, or with overlap_comm. "
            "Record one."
        )
    settings = BucketSettings(
        work.settings.sharder if zero_stage is None else _OF_STAGE[zero_stage],
        work.settings.size if size is None else size,
        work.settings.overlaps if overlaps is None else overlaps,
        work.settings.gathers and replace(work.settings.gathers, **(gathers or {})),
    )
    plan = work.plan_of(settings)
    replayed = work.simulate(work.recorded)
    error = replayed.step_time_ns / work.step_time_ns - 1
    late_ratio = work.late_ns / work.step_time_ns
    trust = replace(work.trust, self_check_error=error, late_ratio=late_ratio)
    trust.expect_prediction()
    predicted = work.simulate(plan, settings, network)
    steps, gains = [], []
    for before, after, stays in work.paces(network):
        for each in (work, *work.worst_cases(plan)):
            steps.append(each.simulate(plan, settings, after).step_time_ns + round(stays))
            gains.append(work.simulate(work.recorded, network=before).step_time_ns - steps[-1])
    low_ns, high_ns = trust.step_range_ns(
        predicted.step_time_ns,
        steps,
        replayed_ns=replayed.step_time_ns,
        exposed_ns=predicted.exposed_ns,
    )
    gain_margin = trust.gain_margin_ns(max(gains, key=abs), replayed.step_time_ns)
    return BucketSimulation(
        run_id=work.run_id,
        rank=work.rank,
        num_steps=work.num_steps,
        settings=settings,
        recorded_step_ns=work.step_time_ns,
        recorded_exposed_ns=round(work.exposed_ns),
        replayed=replayed,
        replay_error=error,
        predicted=predicted,
        backwards_per_step=work.all_per_step,
        low_ns=low_ns,
        high_ns=high_ns,
        change=predicted.step_time_ns / replayed.step_time_ns - 1,
        gain_low_ns=round(min(gains) - gain_margin),
        gain_high_ns=min(round(max(gains) + gain_margin), replayed.step_time_ns),
        added_bytes=work.held_bytes(plan, settings) - work.held_bytes(work.recorded, work.settings),
        assumptions=(*work.assumptions(settings, network), *say_waits_that_stay(work.late_ns)),
        caveats=trust.prediction_caveats,
    )


def find_best_buckets(run: RunSource) -> BucketSimulation | str:
    """The size of buckets with the largest certain gain, or the reason why there is none.

    Larger buffers must fit the memory that the device is known to have left.
    """
    try:
        work = measure_buckets(run)
        sizes = [1e6 * each for each in _MILLIONS] if work.settings.is_zero else _CAPS_MB
        found = [predict_buckets(work, size) for size in sizes]
    except MissingDataError as error:
        return str(error)
    room = 0 if not work.on_host else math.inf
    memory, used = measure_allocatable(run, work.rank), measure_allocator(run, rank=work.rank)
    if memory is not None and used is not None:
        room = memory - used.allocated_bytes
    fits = [each for each in found if each.added_bytes <= max(room, 0)]
    best = max(fits, key=lambda each: each.gain_low_ns, default=None)
    if best is not None and best.gain_low_ns > 0:
        return best
    return (
        f"None of {len(sizes)} simulated sizes of the buckets saves time for certain. The page "
        f"What-if and `fsdp-inspect simulate RUN {_SIZE_OPTIONS[work.settings.is_zero]}` show the "
        "interval of one size."
    )
