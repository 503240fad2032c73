"""What limits the step, why, and what to try next?

One sentence for the end of a run. Shares are of the typical step of the median rank (of
a rank: its own typical step). A limit is named only above its threshold:

| limit         | named when                                                              | rules  |
|---------------|-------------------------------------------------------------------------|--------|
| memory        | a rank's allocator reserved 95 % of its device: the run itself is at risk | R21  |
| memory creep  | what a step leaves allocated grows, and fills the device in 10,000 steps |       |
| input         | waiting for the next batch takes 10 % of the step                       |        |
| host          | the compute stream starves for 10 % of the step                         | R19    |
| straggler     | waiting for one late rank costs 5 % of the step                         | R32    |
| communication | exposed communication, less the floor, takes 5 % of the step            | R1-R17 |
| other         | 30 % of the step lies in no recorded part                               |        |
| compute       | none of these: the plan is fine, "change nothing" is an answer          |        |

Memory comes first, then the largest share; a starved host and a straggler come before
communication, since a late all-gather or a long one is then a symptom. The floor (the first gather
of a forward and the last reduction of a backward, which have no compute beside them) is never
offered as a gain, except where the model is one unit: then everything is floor, and wrapping the
blocks is the advice (R1).
"""

from dataclasses import dataclass, field

from fsdp_inspect.analysis.verdict.facts import (
    MemoryGrowthFacts,
    StepFacts,
    StragglerFacts,
    Waiting,
)
from fsdp_inspect.analysis.verdict.limits import STRAGGLER_RATIO, Limit, find_limit
from fsdp_inspect.analysis.verdict.words import phrase_limit, say_meanwhile

__all__ = [
    "STRAGGLER_RATIO",
    "UNKNOWN",
    "Limit",
    "MemoryGrowthFacts",
    "RankVerdict",
    "StepFacts",
    "StragglerFacts",
    "Verdict",
    "Waiting",
    "give_rank_verdict",
    "give_verdict",
]


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


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """What limits one rank."""

    rank: int
    host: str
    limit: Limit
    sentence: str
    differs: bool
    """Whether something else limits it than the run."""


UNKNOWN = Verdict(
    Limit.UNKNOWN,
    "What limits the step cannot be told: no step counts yet.",
    "The run holds no finished step after warm-up that was not a memory step.",
    ("Record more steps: warm-up and memory steps are never timed.",),
)


def give_verdict(facts: StepFacts) -> Verdict:
    """What limits a step, why, and what to try next."""
    limit = find_limit(facts)
    sentence, why, next_steps = phrase_limit(limit, facts)
    return Verdict(limit, sentence, why, next_steps, _numbers(facts))


def give_rank_verdict(rank: int, host: str, facts: StepFacts, run: Verdict) -> RankVerdict:
    """What limits one rank's typical step, beside what limits the run.

    Under a straggler the other ranks have nothing of their own to say: they wait for it.

    Args:
        rank: Which.
        host: Its machine.
        facts: Of the rank's own typical step; `straggler` that of the run.
        run: What limits the run.
    """
    if run.limit is Limit.STRAGGLER and facts.straggler is not None:
        if facts.straggler.rank == rank:
            meanwhile = say_meanwhile(facts.straggler)
            sentence = "The others wait for it" + (f": {meanwhile}." if meanwhile else ".")
            return RankVerdict(rank, host, Limit.STRAGGLER, sentence, True)
        sentence = f"It waits for rank {facts.straggler.rank}."
        return RankVerdict(rank, host, Limit.STRAGGLER, sentence, False)
    limit = find_limit(facts)
    sentence, _, _ = phrase_limit(limit, facts)
    return RankVerdict(rank, host, limit, sentence, limit is not run.limit)


def _numbers(facts: StepFacts) -> dict[str, float | int | None]:
    growth, straggler = facts.growth, facts.straggler
    return {
        "step_time_ns": facts.step_time_ns,
        "compute_ns": facts.compute_ns,
        "data_ns": facts.data_ns,
        "host_bound_ns": facts.host_bound_ns,
        "exposed_ns": facts.exposed_ns,
        "floor_ns": facts.floor_ns,
        "other_ns": facts.other_ns,
        "backward_gathers_ns": facts.backward_gathers_ns,
        "straggler_rank": straggler.rank if straggler else None,
        "straggler_cost_ns": straggler.cost_ns if straggler else None,
        "peak_allocated_bytes": facts.peak_allocated_bytes,
        "peak_reserved_bytes": facts.peak_reserved_bytes,
        "device_ratio": facts.device_ratio,
        "growth_bytes_per_step": growth.bytes_per_step if growth else None,
    }
