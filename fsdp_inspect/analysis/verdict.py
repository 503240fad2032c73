"""What limits the step, why, and what to try next?

One sentence for the end of a run. Shares are of one real step, the median step of the median rank.
A limit is named only above its threshold:

| limit         | named when                                                              | rules  |
|---------------|-------------------------------------------------------------------------|--------|
| memory        | a rank's allocator reserved 95 % of its device: the run itself is at risk | R21  |
| input         | waiting for the next batch takes 10 % of the step                       |        |
| host          | the compute stream starves for 10 % of the step                         | R19    |
| communication | exposed communication, less the floor, takes 5 % of the step            | R1-R17 |
| other         | 30 % of the step lies in no recorded part                               |        |
| compute       | none of these: the plan is fine, "change nothing" is an answer          |        |

Memory comes first, then the largest share; a starved host comes before communication, since a late
all-gather is then a symptom. The floor (the first gather of a forward and the last reduction of a
backward, which have no compute beside them) is never offered as a gain, except where the model is
one unit: then everything is floor, and wrapping the blocks is the advice (R1).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_unit

MEMORY_RATIO = 0.95
INPUT_RATIO = 0.10
HOST_RATIO = 0.10
COMMUNICATION_RATIO = 0.05
OTHER_RATIO = 0.30
FRAGMENTED_RATIO = 0.10
"""Reserved but not allocated at the peak, as a share of reserved, from which R21 applies."""
DOMINANT_UNIT_RATIO = 0.50
"""Share of the parameters in one unit from which R1 applies."""
WORTH_NAMING_RATIO = 0.02
"""Nothing below this share of the step is advised."""

_PHASES_BY_NAME = frozenset({"forward", "backward"})
"""Phases that place a wait; the others say nothing about it."""


class Limit(StrEnum):
    """What limits the step."""

    MEMORY = "memory"
    INPUT = "input"
    HOST = "host"
    COMMUNICATION = "communication"
    OTHER = "other"
    COMPUTE = "compute"
    UNKNOWN = "unknown"
    """No timed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Whose communication the rank waits for most."""

    fqn: str | None
    """None: not issued by FSDP."""
    kind: str
    phase: str
    exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The numbers that a verdict rests on; times of one step, ns."""

    step_time_ns: int
    compute_ns: int
    """Forward, backward and optimizer."""
    data_ns: int
    host_bound_ns: int
    exposed_ns: int
    floor_ns: int
    other_ns: int
    exposed_by_kind_ns: Mapping[str, int] = field(default_factory=dict)
    """`all_gather`, `reduce_scatter`, `all_reduce`, `other`; they add up to `exposed_ns`."""
    backward_gathers_ns: int = 0
    """Exposed all-gathers of the backward, which `reshard_after_forward=False` removes."""
    top: Waiting | None = None
    reduces_in_float32: bool = False
    """Some unit's gradients are reduced in float32."""
    blocks_host: bool = False
    """The backend's collectives are synchronous."""
    backend: str = ""
    num_units: int = 0
    largest_unit_ratio: float = 0.0
    """Share of the parameters in the largest unit."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    device_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the step."""

    limit: Limit
    sentence: str
    """What limits the step, with the number."""
    why: str
    """What the number is made of."""
    next_steps: tuple[str, ...]
    """What to try, best first; a single "change nothing" is an answer."""
    numbers: dict[str, float | int | None] = field(default_factory=dict)
    """The numbers in the sentences, by metric name."""


UNKNOWN = Verdict(
    Limit.UNKNOWN,
    "What limits the step cannot be told: no step counts yet.",
    "The run holds no finished step after warm-up that was not a memory step.",
    ("Record more steps: warm-up and memory steps are never timed.",),
)


def give_verdict(facts: StepFacts) -> Verdict:
    """What limits a step, why, and what to try next."""
    limit = _find_limit(facts)
    sentence, why, next_steps = _WORDS[limit](facts)
    return Verdict(limit, sentence, why, next_steps, _numbers(facts))


def _find_limit(facts: StepFacts) -> Limit:
    if facts.device_ratio is not None and facts.device_ratio >= MEMORY_RATIO:
        return Limit.MEMORY
    shares = {
        Limit.INPUT: (_ratio(facts, facts.data_ns), INPUT_RATIO),
        Limit.HOST: (_ratio(facts, facts.host_bound_ns), HOST_RATIO),
        Limit.COMMUNICATION: (_ratio(facts, _avoidable_ns(facts)), COMMUNICATION_RATIO),
        Limit.OTHER: (_ratio(facts, facts.other_ns), OTHER_RATIO),
    }
    named = {limit: share for limit, (share, least) in shares.items() if share >= least}
    if Limit.HOST in named:
        named.pop(Limit.COMMUNICATION, None)
    return max(named, key=lambda limit: named[limit], default=Limit.COMPUTE)


def _avoidable_ns(facts: StepFacts) -> int:
    """Exposed time that some plan could hide; in an unwrapped model all of it."""
    return facts.exposed_ns if _is_unwrapped(facts) else facts.exposed_ns - facts.floor_ns


def _is_unwrapped(facts: StepFacts) -> bool:
    return facts.num_units == 1 or facts.largest_unit_ratio > DOMINANT_UNIT_RATIO


def _ratio(facts: StepFacts, duration_ns: int) -> float:
    return duration_ns / facts.step_time_ns if facts.step_time_ns else 0.0


def _share(facts: StepFacts, duration_ns: int) -> str:
    return (
        f"{format_ns(duration_ns)} of the median {format_ns(facts.step_time_ns)} step "
        f"({format_ratio(_ratio(facts, duration_ns))})"
    )


_Words = tuple[str, str, tuple[str, ...]]


def _say_memory(facts: StepFacts) -> _Words:
    reserved, allocated = facts.peak_reserved_bytes or 0, facts.peak_allocated_bytes or 0
    unused = reserved - allocated
    steps = [
        "Recompute activations (activation checkpointing), or halve the microbatch.",
        "Let every block reshard after forward, if some do not.",
    ]
    if reserved and unused / reserved > FRAGMENTED_RATIO:
        steps.insert(
            0,
            f"Set PYTORCH_ALLOC_CONF=expandable_segments:True: {format_bytes(unused)} is reserved "
            "but was not allocated at the peak.",
        )
    return (
        f"Memory is close to the limit: {format_bytes(reserved)} reserved of "
        f"{format_bytes(facts.device_bytes)} ({format_ratio(facts.device_ratio)}).",
        f"The peak of what tensors hold is {format_bytes(allocated)}; the next larger batch or "
        "longer sequence ends in out of memory.",
        tuple(steps),
    )


def _say_input(facts: StepFacts) -> _Words:
    return (
        f"The step is input-bound: it waits {_share(facts, facts.data_ns)} for the next batch.",
        "The training loop asks for a batch that is not ready.",
        (
            "Load batches ahead of the step: more loader workers, prefetching, pinned memory.",
            "Leave the sharding plan as it is until the input keeps up.",
        ),
    )


def _say_host(facts: StepFacts) -> _Words:
    return (
        f"The step is host-bound: the device starves for {_share(facts, facts.host_bound_ns)}.",
        "The compute stream is idle because the host has not issued the next work.",
        (
            "Give the host less to issue per unit of work: torch.compile, a larger microbatch, "
            "fewer and larger units.",
            "Remove synchronisations in the step (.item(), printing a loss, .cpu()).",
            "Prefetch one unit ahead in forward, so that all-gathers are issued earlier.",
        ),
    )


def _say_communication(facts: StepFacts) -> _Words:
    why = [_say_kinds(facts), _say_longest(facts)]
    if facts.blocks_host:
        why.append(
            f"All-gathers and reduce-scatters block the host by default on {facts.backend}, so "
            "they are exposed whatever the plan: a property of the backend."
        )
    elif facts.floor_ns and not _is_unwrapped(facts):
        why.append(
            f"{format_ns(facts.floor_ns)} of the exposed time is the floor, which no setting hides."
        )
    return (
        f"Communication is exposed for {_share(facts, facts.exposed_ns)}.",
        " ".join(sentence for sentence in why if sentence),
        tuple(_advise_communication(facts)),
    )


def _say_kinds(facts: StepFacts) -> str:
    """`All-gather 92.0 ms, reduce-scatter 79.1 ms.`, longest first."""
    exposed = sorted(facts.exposed_by_kind_ns.items(), key=lambda kind: -kind[1])
    named = [
        f"{'not FSDP' if kind == 'other' else kind.replace('_', '-')} {format_ns(duration)}"
        for kind, duration in exposed
        if duration > 0
    ]
    listed = ", ".join(named)
    return f"{listed[0].upper()}{listed[1:]}." if named else ""


def _say_longest(facts: StepFacts) -> str:
    if facts.top is None:
        return ""
    owner = (
        "that FSDP did not issue" if facts.top.fqn is None else f"of {format_unit(facts.top.fqn)}"
    )
    kind = facts.top.kind.replace("_", "-")
    place = f" in {facts.top.phase}" if facts.top.phase in _PHASES_BY_NAME else ""
    lead = "Beyond the floor, the" if facts.floor_ns and not facts.blocks_host else "The"
    waited = format_ns(facts.top.exposed_ns)
    return f"{lead} longest wait, {waited}, is for the {kind} {owner}{place}."


def _advise_communication(facts: StepFacts) -> list[str]:
    steps = []
    if _is_unwrapped(facts):
        steps.append(
            "Call fully_shard on every transformer block, not on the whole model only: one big "
            "unit has no compute to hide behind."
        )
    if _ratio(facts, facts.backward_gathers_ns) >= WORTH_NAMING_RATIO:
        steps.append(
            "Try reshard_after_forward=False if memory allows: the backward gathers again, "
            f"exposed for {format_ns(facts.backward_gathers_ns)}."
        )
    if facts.blocks_host:
        steps.append("Judge overlap and prefetch on GPUs: there a collective blocks a stream only.")
    elif facts.top is not None and facts.top.kind == "all_gather":
        steps.append("Prefetch one unit ahead, so that the all-gather is issued earlier.")
    elif facts.top is not None and facts.top.kind == "reduce_scatter" and facts.reduces_in_float32:
        steps.append(
            "Reduce gradients in bfloat16 (MixedPrecisionPolicy(reduce_dtype)): half the bytes; "
            "check that the loss still falls."
        )
    return steps or ["Look at the most exposed collective first: fsdp-inspect units RUN."]


def _say_other(facts: StepFacts) -> _Words:
    return (
        f"Most of the rest of the step is not FSDP's: {_share(facts, facts.other_ns)} lies "
        "outside every recorded part.",
        "Neither forward, backward, optimizer, data nor communication was running: the loss, "
        "logging, metrics or other code of the training loop.",
        ("Profile the training loop itself, before the sharding plan.",),
    )


def _say_compute(facts: StepFacts) -> _Words:
    return (
        f"The step is compute-bound: forward, backward and optimizer take "
        f"{_share(facts, facts.compute_ns)}.",
        f"Communication is exposed for {_share(facts, facts.exposed_ns)}, of which "
        f"{format_ns(facts.floor_ns)} is the floor, which no setting hides.",
        (
            "Change nothing in the sharding plan.",
            "Faster compute is what is left: torch.compile, bfloat16, less recomputation.",
        ),
    )


def _numbers(facts: StepFacts) -> dict[str, float | int | None]:
    return {
        "step_time_ns": facts.step_time_ns,
        "compute_ns": facts.compute_ns,
        "data_ns": facts.data_ns,
        "host_bound_ns": facts.host_bound_ns,
        "exposed_ns": facts.exposed_ns,
        "floor_ns": facts.floor_ns,
        "other_ns": facts.other_ns,
        "backward_gathers_ns": facts.backward_gathers_ns,
        "peak_allocated_bytes": facts.peak_allocated_bytes,
        "peak_reserved_bytes": facts.peak_reserved_bytes,
        "device_ratio": facts.device_ratio,
    }


_WORDS: dict[Limit, Callable[[StepFacts], _Words]] = {
    Limit.MEMORY: _say_memory,
    Limit.INPUT: _say_input,
    Limit.HOST: _say_host,
    Limit.COMMUNICATION: _say_communication,
    Limit.OTHER: _say_other,
    Limit.COMPUTE: _say_compute,
}
