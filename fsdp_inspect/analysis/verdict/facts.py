"""Define the numbers behind a verdict: times of one step in ns, None or empty if unknown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fsdp_inspect.analysis.batch_work import UnevenWork
from fsdp_inspect.analysis.host_stops import HostStopCost
from fsdp_inspect.analysis.kernels import Kernels
from fsdp_inspect.analysis.memory.growth import MemoryGrowth
from fsdp_inspect.analysis.placement import FarDevice, SharedCores
from fsdp_inspect.analysis.trust import CORES_RATIO, Trust
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import format_ns, listed
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.trace.host_work import COLLECTION
from fsdp_inspect.trace.sharders import FSDP2_TRAITS, SharderTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The owner of the longest exposed time, see `StepFacts.counts_floor`."""

    fqn: str | None
    """The unit's name; None: the collective belongs to no unit."""
    kind: str
    phase: str
    exposed_ns: int
    cause: str = ""
    """The `Cause` of most of the exposed time; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestMoment:
    """The peak of a memory step, in which every storage has an owner."""

    rank: int
    phase: str
    fqn: str | None
    """The innermost unit on the host's stack; None: outside all units."""
    category: str
    """The category with the most bytes."""
    category_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPart:
    """The largest part of the exposed time that FSDP did not cause."""

    kind: str
    phase: str
    dimension: str
    """The dimension of the mesh: `tp`, `world`, ...; `other` if it is unknown."""
    exposed_ns: int
    """Exposed time of this part."""
    total_ns: int
    """Exposed time of all communication that FSDP did not issue."""
    count_per_step: float = 0.0
    """Those of this part that are exposed."""
    place: str = ""
    """`file:line` of the script that issues it; empty: unknown."""


PHASES_BY_NAME = frozenset({"forward", "backward"})
"""The phases that a text names. The other phases do not locate a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that the other ranks wait for."""

    rank: int
    host: str
    """Its machine; empty if all ranks run on one."""
    last_ratio: float
    """Fraction of the sampled collectives at which the rank arrives last."""
    late_ns: int
    """The rank's arrival - the median arrival of the other ranks, as the median over the
    collectives at which the rank is last."""
    phase: str
    """The phase in which the rank loses most time: `forward`, `backward`, ..."""
    meanwhile: str
    """The part of the rank's own work that exceeds the median of the other ranks most: `backward`,
    `data`, ..."""
    meanwhile_ns: int
    """The excess of that part, per step."""
    like_rank: int
    """The median rank, by work, of the other ranks. Its work replaces the straggler's in the
    replay."""
    cost_ns: int
    """Decrease of the typical step without the straggler's systematic extra work."""
    cost_low_ns: int
    """The smallest decrease in a window of replayed steps, also by extra work that other steps do
    not have."""
    cost_high_ns: int
    """The largest such decrease in a window."""
    cost_ratio: float
    """Cost / typical step of the median rank, as in the verdict."""
    waits_ns: dict[str, int]
    """Longest wait of a rank for it per step, by dimension of the mesh, longest first. Waits at
    collectives at which it arrives last. Empty for a mesh of one dimension."""
    between_ns: int = 0
    """Its extra time in checkpoints and evaluation between the steps, per step. No part of the
    cost, which is that of its extra work in the steps."""

    @property
    def cost_range(self) -> str:
        """`12 ms to 20 ms`, over the windows; empty: one window, or they are equal."""
        ends = format_ns(self.cost_low_ns), format_ns(self.cost_high_ns)
        return "" if ends[0] == ends[1] else " to ".join(ends)

    @property
    def waits_for_data(self) -> bool:
        """Whether waiting for batches makes at least half of its cost."""
        return self.meanwhile == "data" and 2 * self.meanwhile_ns >= self.cost_ns

    @property
    def named_phase(self) -> str:
        """`phase`, if it locates the extra work; empty: it does not."""
        return "" if self.waits_for_data or self.phase not in PHASES_BY_NAME else self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGroup:
    """The ranks of one place that the others wait for; see `analysis.stragglers.evidence`."""

    names: tuple[str, ...]
    """Names of the place, the plainest first: `pp 1`, `node b`, `tp group of rank 4`. With several
    names, the run cannot show which of the places is the reason."""
    ranks: tuple[int, ...]
    """The ranks, ascending."""
    busiest_ratio: float
    """Fraction of the steps in which each of the ranks works longer than every other rank."""
    last_ratio: float
    """Fraction of the sampled collectives with other ranks at which one of the ranks is last; 0
    without such collectives."""
    late_ns: int
    """Median delay of the last of the ranks behind the median of the other ranks."""
    phase: str
    """The phase with the largest delay; empty without collectives with other ranks."""
    meanwhile: str
    """The part of the step that exceeds the same part of the other ranks most."""
    meanwhile_ns: int
    """The excess of that part, per step."""
    cost_ns: int
    """Decrease of the typical step without the systematic extra work of these ranks."""
    bound_because: str
    """The reason why the cost is an upper bound, as a clause; empty: it is replayed."""
    cost_ratio: float
    """Cost / typical step of the median rank."""
    between_ns: int = 0
    """See `Straggler.between_ns`."""

    @property
    def at_most(self) -> str:
        """`at most ` before a cost that is an upper bound; else empty."""
        return "at most " if self.bound_because else ""


_MOST_STEPS = 6


@dataclass(frozen=True, slots=True)
class RareWork:
    """The steps in which one rank works much longer than all others; no other rank ever does."""

    rank: int
    steps: tuple[int, ...]
    out_of: int
    extra_ns: int
    """Its work - the longest work of another rank, as the median over these steps."""
    mean_ns: int
    """The same in the mean step."""
    chance: float
    """The probability that one of as many equal ranks has all of these steps."""
    num_ranks: int
    part: str | None = None
    """The part of the step, a `StepPart`, with most of the extra work; None: no part has half."""
    others_wait: bool = False
    """Whether the other ranks wait longer in these steps, by at least half of the extra work."""

    @property
    def sentence(self) -> str:
        """How much longer the rank works, and in which steps."""
        others = "the other rank" if self.num_ranks == 2 else "all other ranks"
        name = find_metric(f"{self.part}_ns").label if self.part else ""
        part = f" Most of it lies in the part {name}." if name else ""
        return (
            f"Rank {self.rank} works much longer than {others} in {len(self.steps)} of "
            f"{self.out_of} timed steps, by {format_ns(self.extra_ns)} each (median): "
            f"{format_ns(self.mean_ns)} in the mean step.{part} Steps: "
            f"{listed([str(step) for step in self.steps], _MOST_STEPS)}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The numbers of one typical step behind a verdict."""

    step_time_ns: int
    compute_ns: int
    """Time of forward, backward and optimizer. In a kernel trace it includes compute of unknown
    phase."""
    data_ns: int
    host_bound_ns: int
    exposed_ns: int
    floor_ns: int
    other_ns: int
    knows_floor: bool = True
    """False: `floor_ns` is 0 because the events of the rank are missing."""
    host_behind_ns: int = 0
    """Upper bound of the device's idle time for lack of work; see [Note: the host behind the
    device] in `store.reduction.step_parts`."""
    utilisation_ratio: float | None = None
    """Fraction of the time in which the device of the median rank runs a kernel, by NVML."""
    exposed_by_kind_ns: Mapping[str, int] = field(default_factory=dict)
    """Exposed time of `all_gather`, `reduce_scatter`, `all_reduce` and `other`. They add up to
    `exposed_ns`."""
    causes_ns: Mapping[str, int] = field(default_factory=dict)
    """Exposed time by cause, only causes above 0; empty if the causes are unknown."""
    backward_gathers_ns: int = 0
    """Exposed time of the all-gathers in backward, which `SharderTraits.keep_gathered` removes."""
    top: Waiting | None = None
    reduces_in_float32: bool = False
    """Whether at least one unit reduces its gradients in float32."""
    blocks_host: bool = False
    """Whether the collectives of the backend are synchronous."""
    backend: str = ""
    is_kernel_trace: bool = False
    """Whether the run is an imported kernel trace, which shows when kernels ran, but no waits for
    collectives or data."""
    sharder: SharderTraits = FSDP2_TRAITS
    """The sharder whose settings the verdict names."""
    lacks_training: bool = False
    """Whether the run is a trace of inference, for which no advice about training applies."""
    knows_fsdp: bool = True
    """Whether a collective without a unit is known not to come from FSDP."""
    other_part: OtherPart | None = None
    """The largest part outside FSDP. No sharding plan changes it."""
    between_passes: OtherPart | None = None
    """The largest part outside forward, backward and optimizer, if `knows_fsdp` is false."""
    has_plan: bool = False
    """Whether the run has its sharding plan, so that `advise` can simulate other plans. The verdict
    then names no change of the plan, because only the simulation decides which change helps."""
    has_gathers: bool = True
    """Whether the step gathers parameters. The sharding plan can then be changed."""
    num_units: int = 0
    largest_unit_ratio: float = 0.0
    """Fraction of the parameters in the largest unit."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    device_ratio: float | None = None
    fragmentation_ratio: float | None = None
    """(reserved - active) / reserved at the peak; None: not recorded."""
    num_alloc_retries: int | None = None
    highest: HighestMoment | None = None
    """The peak of a memory step; None if no memory step records its contents."""
    rank: int | None = None
    """The rank of the step; None: unknown."""
    trust: Trust = field(default_factory=Trust)
    straggler: Straggler | None = None
    slow_group: SlowGroup | None = None
    growth: MemoryGrowth | None = None
    collection_ns: int = 0
    """Garbage collections in the step. They are part of other times, such as `other_ns`."""
    between_ns: int = 0
    """Checkpoints and evaluation before the step, which the step time does not contain."""
    recompute_ns: int = 0
    """Repeated forwards of activation checkpointing, a part of `compute_ns`."""
    first_gather: Waiting | None = None
    """The first all-gather and the last reduction of a root unit that is much larger than the other
    units. Their waits are part of the floor. None: no such unit."""
    backward_order_ns: int = 0
    """Exposed time of late or unused all-gathers in backward, if the script sets the units that
    backward prefetches."""
    root_gather_ns: int = 0
    """Exposed time of the root unit's all-gather in backward."""
    latency_ns: int = 0
    """Exposed time that messages without bytes would have, too; 0 if it is unknown."""
    stop: HostStopCost | None = None
    """The line that stops a host for most time, as far as this time is lost; None: unknown."""
    collect_call: HostStopCost | None = None
    """`HostStops.collect_call`."""
    reads: tuple[HostStopCost, ...] = ()
    """The lines that read values of tensors. On a device their time is no cost of its own."""
    driver_calls: tuple[HostStopCost, ...] = ()
    """`HostStops.driver_calls`."""
    rare: RareWork | None = None
    """The steps in which one rank works much longer; None: none, chance, or too many ranks."""
    uneven: UnevenWork | None = None
    """The batches of the straggler against those of the other ranks; None: not larger."""
    kernels: Kernels | None = None
    """The kernels of profiled steps; None: no step was profiled."""
    shared_cores: SharedCores | None = None
    """The cores of the rank that lacks cores; None: unknown."""
    far_device: FarDevice | None = None
    """A rank on another NUMA node than its GPU; None: none is known."""
    contradiction: str | None = None
    """The contradiction between the run and its plan, as a sentence; None: there is none."""

    def ratio(self, duration_ns: int) -> float:
        """Return a time as a fraction of the step; 0 for a step without duration."""
        return duration_ns / self.step_time_ns if self.step_time_ns else 0.0

    @property
    def is_mostly_outside(self) -> bool:
        """Whether other code exposes more communication than FSDP."""
        return self.other_part is not None and 2 * self.other_part.total_ns > self.exposed_ns

    @property
    def device_idle_ns(self) -> int:
        """Time in which the device is idle because of the host, as far as it is known.

        The waits for collectives that the host has not issued. With the device's utilisation: the
        time without a kernel, if the device lacks work for that long.
        """
        if self.utilisation_ratio is None:
            return self.host_bound_ns
        without_kernel = round((1 - self.utilisation_ratio) * self.step_time_ns)
        return max(self.host_bound_ns, min(self.host_behind_ns, without_kernel))

    @property
    def known_latency_ns(self) -> int:
        """The exposed latency that larger units save; 0 if it may be waits for other ranks."""
        return self.latency_ns if self.num_units > 1 and not self.trust.missing_ranks else 0

    @property
    def collection_cost_ns(self) -> int:
        """Garbage collections of the step, or of the rank for which the others wait."""
        is_collection = self.stop is not None and self.stop.what == COLLECTION
        return max(self.collection_ns, self.stop_ns if is_collection else 0)

    @property
    def stop_ns(self) -> int:
        """Time per step, over all steps, that the host stops at one line."""
        return 0 if self.stop is None else self.stop.duration_ns

    @property
    def stops_alone(self) -> bool:
        """Whether one rank alone stops for long, so that the others wait for it."""
        least_ns = HOST_STOP_RATIO * self.step_time_ns
        return self.stop is not None and self.stop.is_alone and self.stop_ns >= least_ns

    @property
    def between_ratio(self) -> float:
        """Time between steps as a fraction of it and the step together."""
        whole = self.between_ns + self.step_time_ns
        return self.between_ns / whole if whole else 0.0

    @property
    def is_unwrapped(self) -> bool:
        """Whether one unit holds most of the model, so that no compute hides its communication."""
        return self.num_units == 1 or self.largest_unit_ratio > DOMINANT_UNIT_RATIO

    @property
    def counts_floor(self) -> bool:
        """Whether the largest wait includes its floor.

        It does in an unwrapped model, where a change hides the floor, and where collectives block
        the host, because then no sentence states the floor.
        """
        return self.blocks_host or self.is_unwrapped

    @property
    def avoidable_ns(self) -> int:
        """Exposed time that some change can hide. In an unwrapped model, this is all of it."""
        return self.exposed_ns if self.is_unwrapped else self.exposed_ns - self.floor_ns

    @property
    def hideable_ns(self) -> int | None:
        """Exposed time that compute can hide; None: unknown. Buckets only shorten their floor."""
        if not self.knows_floor:
            return None
        splits_units = self.is_unwrapped and self.sharder.units_have_passes
        return self.exposed_ns - (0 if splits_units else self.floor_ns)

    @property
    def balanced_ns(self) -> int | None:
        """What batches of equal size save of the straggler's cost; None: batches are not why."""
        uneven, straggler = self.uneven, self.straggler
        if uneven is None or straggler is None or 2 * uneven.num_more <= uneven.out_of:
            return None
        share = (1 - uneven.balanced_ratio) * uneven.ratio / max(uneven.ratio - 1, 0.01)
        return min(round(straggler.cost_ns * share), straggler.cost_ns)

    @property
    def rare_ns(self) -> int:
        """The extra work of some steps of one rank, in the mean step; 0 with a late rank."""
        is_late = self.straggler is not None or self.slow_group is not None
        return 0 if self.rare is None or is_late else self.rare.mean_ns

    @property
    def late_ranks_ns(self) -> int:
        """Exposed time of waits for ranks that arrive later."""
        return self.causes_ns.get(Cause.STRAGGLER.label, 0)


DOMINANT_UNIT_RATIO = 0.50
"""R1 applies if one unit holds more than this fraction of the parameters."""
OVERSIZED_RATIO = 2.0
"""A unit is much larger than the others above this multiple of the median unit."""


# --- Define the thresholds of the limits and the order in which they apply.

MEMORY_RATIO = 0.95
INPUT_RATIO = 0.10
HOST_RATIO = 0.10
HOST_BEHIND_RATIO = 0.50
"""If the device may lack work for this fraction of the step, compute is its limit only if the
device is known to be busy."""
BUSY_RATIO = 0.90
"""The utilisation from which a device is busy."""
STRAGGLER_RATIO = 0.05
"""Also for a slow group."""
COMMUNICATION_RATIO = 0.05
COLLECTION_RATIO = 0.05
HOST_STOP_RATIO = 0.05
LEAST_IDLE_RATIO = 0.01
"""Less idle time of the device in calls of one kind is not worth a sentence."""
BETWEEN_RATIO = 0.10
RECOMPUTE_RATIO = 0.15
FIRST_GATHER_RATIO = 0.10
WRONG_SETTING_RATIO = 0.25
"""The fraction of the exposed time from which a wrong setting of the plan is its headline."""
MAIN_PART_RATIO = 0.50
"""The same for a part without a certain remedy."""
OTHER_RATIO = 0.30
CREEP_STEPS = 10_000
"""Growth is a risk if it fills the device within this number of steps."""
CREEP_RATIO = 0.001
"""If the device's memory is unknown, growth is a risk from this fraction of the peak per step."""


class Limit(StrEnum):
    """The limit of the step."""

    TRAINING = "training"
    """The training itself is wrong."""
    MEMORY = "memory"
    MEMORY_CREEP = "memory_creep"
    """Memory growth: allocated memory rises from step to step."""
    INPUT = "input"
    CORES = "cores"
    """Training threads wait for a CPU core."""
    HOST = "host"
    HOST_OR_COMPUTE = "host_or_compute"
    """The device may lack work for most of the step, and how busy it is, is unknown."""
    STRAGGLER = "straggler"
    SLOW_GROUP = "slow_group"
    """All ranks of a node, a TP group or a pipeline stage work longer than the other ranks."""
    COMMUNICATION = "communication"
    COLLECTION = "garbage_collection"
    HOST_STOP = "host_stop"
    """One line of the script stops the host: reads of values, or compilations."""
    BETWEEN = "between_steps"
    """Checkpoints or evaluation between the steps."""
    RARE_WORK = "rare_work"
    """One rank works much longer than the others in some steps."""
    RECOMPUTE = "recomputation"
    FIRST_GATHER = "first_gather"
    """The first all-gather and the last reduction, of a root much larger than the other units."""
    BACKWARD_ORDER = "backward_order"
    """The units that the script prefetches in backward."""
    ROOT_GATHER = "root_gather"
    """The root unit is gathered again in backward."""
    LATENCY = "latency"
    OTHER = "other"
    COMPUTE = "compute"
    UNKNOWN = "unknown"
    """There is no timed step, or the trace lacks data."""


OF_WAITS = frozenset(
    {
        Limit.COMMUNICATION,
        Limit.FIRST_GATHER,
        Limit.BACKWARD_ORDER,
        Limit.ROOT_GATHER,
        Limit.LATENCY,
    }
)
"""Limits that are waits for communication."""
_OF_CORES = frozenset({Limit.HOST, Limit.COMMUNICATION, Limit.OTHER, Limit.RARE_WORK})
"""Limits that a missing core may cause."""
_BESIDE = frozenset(
    {
        Limit.INPUT,
        Limit.COLLECTION,
        Limit.HOST_STOP,
        Limit.BETWEEN,
        Limit.RARE_WORK,
        Limit.RECOMPUTE,
    }
)
"""Costs with a remedy of their own, whatever the limit is."""
_BEFORE_COMMUNICATION = frozenset({Limit.HOST, Limit.STRAGGLER, Limit.SLOW_GROUP})
"""Limits of which a long wait for communication is a symptom."""


def find_limit(facts: StepFacts) -> Limit:
    """Return the limit of a step. A risk for the run comes first, then the largest ratio."""
    if facts.device_ratio is not None and facts.device_ratio >= MEMORY_RATIO:
        return Limit.MEMORY
    if _creeps(facts):
        return Limit.MEMORY_CREEP
    named = _find_named(facts)
    limit = max(named, key=lambda limit: named[limit], default=_compute(facts))
    is_communication = limit in (Limit.COMMUNICATION, Limit.FIRST_GATHER)
    return _part_of_communication(facts, limit) if is_communication else limit


def find_cost_beside(facts: StepFacts, limit: Limit) -> Limit | None:
    """The largest cost besides the limit that has a remedy of its own; None: none is large."""
    named = _find_named(facts)
    if limit in (Limit.MEMORY, Limit.MEMORY_CREEP) or Limit.CORES in named:
        return None
    beside = {each: share for each, share in named.items() if each in _BESIDE - {limit}}
    return max(beside, key=lambda each: beside[each], default=None)


def _find_named(facts: StepFacts) -> dict[Limit, float]:
    """The limits above their thresholds, with their ratios; without symptoms of others."""
    late = facts.straggler.cost_ns if facts.straggler else 0
    group = facts.slow_group.cost_ns if facts.slow_group else 0
    first = facts.first_gather.exposed_ns if facts.first_gather else 0
    is_collection = facts.stop is not None and facts.stop.what == COLLECTION
    collection, stop = facts.collection_cost_ns, 0 if is_collection else facts.stop_ns
    shares = {
        Limit.INPUT: (facts.ratio(facts.data_ns), INPUT_RATIO),
        Limit.CORES: (facts.trust.run_delay_ratio, CORES_RATIO),
        Limit.HOST: (facts.ratio(facts.device_idle_ns), HOST_RATIO),
        Limit.STRAGGLER: (facts.ratio(late), STRAGGLER_RATIO),
        Limit.SLOW_GROUP: (facts.ratio(group), STRAGGLER_RATIO),
        Limit.COMMUNICATION: (facts.ratio(facts.avoidable_ns), COMMUNICATION_RATIO),
        Limit.COLLECTION: (facts.ratio(collection), COLLECTION_RATIO),
        Limit.HOST_STOP: (facts.ratio(stop), HOST_STOP_RATIO),
        Limit.BETWEEN: (facts.between_ratio, BETWEEN_RATIO),
        Limit.RARE_WORK: (facts.ratio(facts.rare_ns), STRAGGLER_RATIO),
        Limit.RECOMPUTE: (facts.ratio(facts.recompute_ns), RECOMPUTE_RATIO),
        Limit.FIRST_GATHER: (facts.ratio(first), FIRST_GATHER_RATIO),
        Limit.OTHER: (
            facts.ratio(facts.other_ns - max(collection, stop)),
            OTHER_RATIO,
        ),
    }
    named = {limit: share for limit, (share, least) in shares.items() if share >= least}
    if Limit.BETWEEN in named:  # its threshold is of the whole time, and the others are of the step
        named[Limit.BETWEEN] = facts.ratio(facts.between_ns)
    if facts.stops_alone:  # the others wait for this rank
        named.pop(Limit.COMMUNICATION, None)
        if 2 * facts.stop_ns >= facts.rare_ns:
            named.pop(Limit.RARE_WORK, None)
        if facts.straggler is not None and 2 * facts.stop_ns >= late:
            named.pop(Limit.STRAGGLER, None)
    if Limit.CORES in named:
        named = {limit: share for limit, share in named.items() if limit not in _OF_CORES}
    if not named.keys().isdisjoint(_BEFORE_COMMUNICATION):
        named.pop(Limit.COMMUNICATION, None)
    return named


def _compute(facts: StepFacts) -> Limit:
    """Return compute as the limit, unless the device may be idle for most of the step."""
    is_busy = facts.utilisation_ratio is not None and facts.utilisation_ratio >= BUSY_RATIO
    may_lack_work = facts.ratio(facts.host_behind_ns) >= HOST_BEHIND_RATIO
    return Limit.HOST_OR_COMPUTE if may_lack_work and not is_busy else Limit.COMPUTE


def _part_of_communication(facts: StepFacts, limit: Limit) -> Limit:
    """The part of the exposed time with the clearest remedy; the given limit if no part is large.

    A wrong setting of the plan comes first, because its remedy costs nothing.
    """
    is_late = 2 * facts.late_ranks_ns > facts.exposed_ns
    if facts.blocks_host or is_late or facts.is_mostly_outside:
        return limit
    first = facts.first_gather.exposed_ns if facts.first_gather else 0
    for least, parts in (
        (
            WRONG_SETTING_RATIO,
            {
                Limit.BACKWARD_ORDER: facts.backward_order_ns,
                Limit.ROOT_GATHER: facts.root_gather_ns,
            },
        ),
        (
            MAIN_PART_RATIO,
            {
                Limit.FIRST_GATHER: first,
                Limit.LATENCY: facts.known_latency_ns,
            },
        ),
    ):
        largest = max(parts, key=lambda part: parts[part])
        if parts[largest] >= max(least * facts.exposed_ns, 1):
            return largest
    return limit


def _creeps(facts: StepFacts) -> bool:
    growth = facts.growth
    if growth is None or growth.growth_bytes_per_step is None:
        return False
    if growth.steps_until_full is not None:
        return growth.steps_until_full <= CREEP_STEPS
    peak = facts.peak_allocated_bytes
    return bool(peak) and growth.growth_bytes_per_step >= CREEP_RATIO * (peak or 0)
