"""Find the limit of the step, its reason, and the changes to try next.

Ratios refer to the typical step of the median rank; for the verdict on one rank, to the typical
step of that rank. Each limit has a threshold:

| limit         | condition                                                            | rules  |
|---------------|----------------------------------------------------------------------|--------|
| training      | the training itself is wrong: see `analysis.correctness`             |        |
| memory        | a rank's allocator reserves 95% of its device: the run is at risk    | R21    |
| memory growth | memory at the end of a step grows and fills the device in 10,000 steps |      |
| cores         | a training thread has no CPU core for 25% of the time                |        |
| input         | waiting for the next batch takes 10% of the step                     |        |
| host          | the step is host-bound for 10% of its time, or the device is idle    | R19    |
|               | for 10% and lacks work for that long                                 |        |
| straggler     | one straggler costs 5% of the step                                   | R32    |
| slow group    | one node, stage or group of ranks costs 5% of the step               | R32    |
| communication | exposed communication, without the floor, takes 5% of the step       | R1-R17 |
| collection    | Python collects garbage for 5% of the step                           |        |
| host stop     | one line reads values or recompiles for 5% (device: recompiles)      |        |
| between steps | checkpoints and evaluation take 10% of the step and that time        |        |
| rare work     | one rank works much longer in some steps: 5% of the mean step        | R32    |
| recomputation | repeated forwards of activation checkpointing take 15% of the step   | R18    |
| first gather  | a root much larger than the other units: its first gather and last    | R1, R3 |
|               | reduction take 10%                                                   |        |
| backward      | communication, and a quarter of it is late or unused all-gathers of  | R11    |
| order         | an order that the script sets                                        |        |
| root gather   | communication, and a quarter of it is the root's second all-gather   | R8     |
| latency       | communication, and half of it is latency                             | R2     |
| other         | 30% of the step lies in no recorded part                             |        |
| host or       | none of these; the device may lack work for half of the step, and is |        |
| compute       | not known to be busy                                                 |        |
| compute       | none of these: the plan is fine, and the advice is "change nothing"  |        |

A wrong training comes first, then memory, then the largest ratio. Missing cores come before a
host-bound step, communication and other parts, which they may cause. A host-bound step, a straggler
and a slow group come before communication, because a late or a long all-gather is then a symptom.
The floor (the first gather of a forward and the last reduction of a backward) is never counted as a
gain, because no compute runs next to it. The exception is a model in one unit: all of its exposed
time is floor, and the advice is to wrap the blocks (R1).
"""

from dataclasses import dataclass, field, replace

from fsdp_inspect.analysis.correctness import TrainingFault
from fsdp_inspect.analysis.verdict.facts import (
    OF_WAITS,
    STRAGGLER_RATIO,
    HighestMoment,
    Limit,
    OtherPart,
    RareWork,
    SlowGroup,
    StepFacts,
    Straggler,
    Waiting,
    find_limit,
)
from fsdp_inspect.analysis.verdict.words import (
    BY_SIMULATION,
    COMPARE_PLANS,
    collect_less,
    describe_extra_work,
    describe_group,
    phrase_largest_part,
    phrase_limit,
    phrase_outside,
)
from fsdp_inspect.store.reduction.order_wording import shorten_place

__all__ = [
    "BY_SIMULATION",
    "COMPARE_PLANS",
    "NO_STEPS",
    "STRAGGLER_RATIO",
    "UNKNOWN",
    "HighestMoment",
    "Limit",
    "OtherPart",
    "RankVerdict",
    "RareWork",
    "SlowGroup",
    "StepFacts",
    "Straggler",
    "Verdict",
    "Waiting",
    "give_no_verdict",
    "give_rank_verdict",
    "give_verdict",
    "give_verdict_on_training",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit of the step, with sentences and numbers."""

    limit: Limit
    sentence: str
    """The headline, which states the limit with one number in at most 12 words."""
    why: str
    """All details behind the headline."""
    next_steps: tuple[str, ...]
    """Changes to try, best first. It may be a single "change nothing"."""
    numbers: dict[str, float | int | None] = field(default_factory=dict)
    """The numbers behind the verdict, by metric name."""
    is_outside_fsdp: bool = False
    """Whether the limit is communication, and FSDP did not issue most of it."""
    because: str = ""
    """The main reason in one short sentence, with the unit, the cause and the rank if known. Empty:
    there is no limit, and `why` has the reason."""
    collect_less: str = ""
    """What removes the garbage collections of a step; empty: it has none."""
    outside: tuple[str, ...] = ()
    """The cost of communication that FSDP did not issue, and its remedy, beside that of FSDP."""
    largest_part: str = ""
    """The sentence that compute takes more of the step than the waits of the headline, and what
    hiding them saves at most; else empty."""
    speed: "Verdict | None" = None
    """The verdict on the speed, if this one is about a mistake of the training."""

    @property
    def why_alone(self) -> str:
        """The details, without the speed of a training that is wrong."""
        return self.why if self.speed is None else self.why.removesuffix(_say_speed(self.speed))

    @property
    def of_speed(self) -> "Verdict":
        """The verdict on the speed, on which advice about the plan depends."""
        return self.speed or self


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """The limit of one rank."""

    rank: int
    host: str
    limit: Limit
    sentence: str
    differs: bool
    """Whether the limit of the rank differs from the limit of the run."""


UNKNOWN = Verdict(
    Limit.UNKNOWN,
    "The limit is unknown: the run has no timed step.",
    "A timed step is a completed step that is not a warm-up, memory or numerics step.",
    ("Record more steps.",),
)


NO_STEPS = Verdict(
    Limit.UNKNOWN,
    "The limit is unknown: the import has no timed step.",
    "Flight recorder dumps and memory snapshots have no times of steps.",
    ("For times, record the job with fsdp_inspect.Recorder, or import torch.profiler traces.",),
)


def give_no_verdict(sentence: str, why: str, next_step: str) -> Verdict:
    """Return a verdict without a limit, because the trace lacks data."""
    return Verdict(Limit.UNKNOWN, sentence, why, (next_step,))


def give_verdict_on_training(fault: TrainingFault, speed: Verdict) -> Verdict:
    """Return the verdict on a training that is wrong; the verdict on its speed follows."""
    place = f" Seen at {shorten_place(fault.place)}." if fault.place else ""
    return replace(
        speed,
        limit=Limit.TRAINING,
        sentence=fault.headline,
        why=f"{fault.why}{place}{_say_speed(speed)}",
        next_steps=(fault.change, *speed.next_steps),
        because=fault.why.partition(". ")[0].rstrip(".") + ".",
        largest_part="",
        speed=speed,
    )


def _say_speed(speed: Verdict) -> str:
    return f" Its speed: {speed.sentence}"


def give_verdict(facts: StepFacts) -> Verdict:
    """Return the limit of a step, its reason, and the changes to try next."""
    limit = find_limit(facts)
    sentence, because, why, next_steps = phrase_limit(limit, facts)
    caveats = (
        facts.trust.wait_caveat if limit in OF_WAITS else None,
        facts.trust.caveat_beside_cores if limit is Limit.CORES else facts.trust.time_caveat,
    )
    why = " ".join(filter(None, (why, *caveats)))
    return Verdict(
        limit,
        sentence,
        why,
        next_steps,
        _numbers(facts),
        is_outside_fsdp=limit is Limit.COMMUNICATION and facts.is_mostly_outside,
        because=because,
        collect_less=collect_less(facts)[0] if facts.collection_ns else "",
        outside=phrase_outside(facts) if limit is Limit.COMMUNICATION else (),
        largest_part=phrase_largest_part(limit, facts),
    )


def give_rank_verdict(rank: int, host: str, facts: StepFacts, run: Verdict) -> RankVerdict:
    """Return the limit of one rank's typical step.

    If a straggler or a slow group limits the run, the other ranks have no own limit, because they
    wait for it.

    Args:
        rank: The rank.
        host: The machine of the rank.
        facts: The typical step of the rank, with the `straggler` and the `slow_group` of the run.
        run: The verdict on the run.
    """
    if run.limit is Limit.STRAGGLER and facts.straggler is not None:
        if facts.straggler.rank == rank:
            extra = describe_extra_work(facts.straggler)
            sentence = "The other ranks wait for this rank" + (f": {extra}." if extra else ".")
            return RankVerdict(rank, host, Limit.STRAGGLER, sentence, True)
        sentence = f"This rank waits for rank {facts.straggler.rank}."
        return RankVerdict(rank, host, Limit.STRAGGLER, sentence, False)
    if run.limit is Limit.SLOW_GROUP and facts.slow_group is not None:
        name = describe_group(facts.slow_group.names[0])
        is_inside = rank in facts.slow_group.ranks
        sentence = (
            f"The other ranks wait for {name}." if is_inside else f"This rank waits for {name}."
        )
        return RankVerdict(rank, host, Limit.SLOW_GROUP, sentence, is_inside)
    limit = find_limit(facts)
    sentence, *_ = phrase_limit(limit, facts)
    return RankVerdict(rank, host, limit, sentence, limit is not run.limit)


def _numbers(facts: StepFacts) -> dict[str, float | int | None]:
    growth, straggler, group = facts.growth, facts.straggler, facts.slow_group
    late = straggler or group
    return {
        "step_time_ns": facts.step_time_ns,
        "compute_ns": facts.compute_ns,
        "data_ns": facts.data_ns,
        "run_delay_ratio": facts.trust.run_delay_ratio,
        "host_bound_ns": facts.host_bound_ns,
        "host_behind_ns": facts.host_behind_ns,
        "device_idle_ns": facts.device_idle_ns,
        "exposed_ns": facts.exposed_ns,
        "floor_ns": facts.floor_ns,
        "other_ns": facts.other_ns,
        "exposed_other_ns": facts.exposed_by_kind_ns.get("other"),
        "backward_gathers_ns": facts.backward_gathers_ns,
        "straggler_rank": straggler.rank if straggler else None,
        "straggler_cost_ns": straggler.cost_ns if straggler else None,
        "slow_group_cost_ns": group.cost_ns if group else None,
        "late_between_ns": late.between_ns if late else None,
        "peak_allocated_bytes": facts.peak_allocated_bytes,
        "peak_reserved_bytes": facts.peak_reserved_bytes,
        "device_ratio": facts.device_ratio,
        "garbage_collection_ns": facts.collection_cost_ns,
        "host_stop_ns": facts.stop_ns if facts.stop else None,
        "between_steps_ns": facts.between_ns,
        "rare_work_rank": facts.rare.rank if facts.rare else None,
        "rare_work_ns": facts.rare_ns if facts.rare else None,
        "recompute_ns": facts.recompute_ns,
        "first_gather_ns": facts.first_gather.exposed_ns if facts.first_gather else None,
        "backward_order_ns": facts.backward_order_ns,
        "root_gather_ns": facts.root_gather_ns,
        "latency_ns": facts.latency_ns,
        "balanced_ns": facts.balanced_ns,
        "growth_bytes_per_step": growth.growth_bytes_per_step if growth else None,
    }
