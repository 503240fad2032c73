"""Define the thresholds of the limits and the order in which they apply."""

from enum import StrEnum

from fsdp_inspect.analysis.verdict.facts import StepFacts

MEMORY_RATIO = 0.95
INPUT_RATIO = 0.10
CORES_RATIO = 0.25
"""The fraction of the time in which a training thread has no core, from which no other time can be
trusted."""
HOST_RATIO = 0.10
STRAGGLER_RATIO = 0.05
"""Also for a slow group."""
COMMUNICATION_RATIO = 0.05
OTHER_RATIO = 0.30
CREEP_STEPS = 10_000
"""Growth is a risk if it fills the device within this number of steps."""
CREEP_RATIO = 0.001
"""If the device's memory is unknown, growth is a risk from this fraction of the peak per step."""


class Limit(StrEnum):
    """The limit of the step."""

    MEMORY = "memory"
    MEMORY_CREEP = "memory_creep"
    """Memory growth: allocated memory rises from step to step."""
    INPUT = "input"
    CORES = "cores"
    """Training threads wait for a CPU core."""
    HOST = "host"
    STRAGGLER = "straggler"
    SLOW_GROUP = "slow_group"
    """All ranks of a node, a TP group or a pipeline stage work longer than the other ranks."""
    COMMUNICATION = "communication"
    OTHER = "other"
    COMPUTE = "compute"
    UNKNOWN = "unknown"
    """There is no timed step, or the trace lacks data."""


_OF_CORES = frozenset({Limit.HOST, Limit.COMMUNICATION, Limit.OTHER})
"""Limits that a missing core may cause."""
_BEFORE_COMMUNICATION = frozenset({Limit.HOST, Limit.STRAGGLER, Limit.SLOW_GROUP})
"""Limits of which a long wait for communication is a symptom."""


def find_limit(facts: StepFacts) -> Limit:
    """Return the limit of a step. A risk for the run comes first, then the largest ratio."""
    if facts.device_ratio is not None and facts.device_ratio >= MEMORY_RATIO:
        return Limit.MEMORY
    if _creeps(facts):
        return Limit.MEMORY_CREEP
    late = facts.straggler.cost_ns if facts.straggler else 0
    group = facts.slow_group.cost_ns if facts.slow_group else 0
    shares = {
        Limit.INPUT: (facts.ratio(facts.data_ns), INPUT_RATIO),
        Limit.CORES: (facts.core_wait_ratio, CORES_RATIO),
        Limit.HOST: (facts.ratio(facts.host_bound_ns), HOST_RATIO),
        Limit.STRAGGLER: (facts.ratio(late), STRAGGLER_RATIO),
        Limit.SLOW_GROUP: (facts.ratio(group), STRAGGLER_RATIO),
        Limit.COMMUNICATION: (facts.ratio(facts.avoidable_ns), COMMUNICATION_RATIO),
        Limit.OTHER: (facts.ratio(facts.other_ns), OTHER_RATIO),
    }
    named = {limit: share for limit, (share, least) in shares.items() if share >= least}
    if Limit.CORES in named:
        named = {limit: share for limit, share in named.items() if limit not in _OF_CORES}
    if not named.keys().isdisjoint(_BEFORE_COMMUNICATION):
        named.pop(Limit.COMMUNICATION, None)
    return max(named, key=lambda limit: named[limit], default=Limit.COMPUTE)


def _creeps(facts: StepFacts) -> bool:
    growth = facts.growth
    if growth is None:
        return False
    if growth.steps_until_full is not None:
        return growth.steps_until_full <= CREEP_STEPS
    peak = facts.peak_allocated_bytes
    return bool(peak) and growth.bytes_per_step >= CREEP_RATIO * (peak or 0)
