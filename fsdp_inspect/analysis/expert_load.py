"""Compare the load of the ranks that share experts, and judge whether it explains their waits.

An all-to-all ends when the last rank has sent its part. So ranks with few tokens wait for the rank
whose experts receive most. The recorded evidence is the size of the messages: a rank sends the
results of its experts back, so the bytes of its all-to-alls grow with the tokens that its experts
received. Equal sizes are no evidence of equal load: some routers pad every message.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.mesh_dimensions import dimension_members
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunSource

EXPERTS = "ep"
LEAST_IMBALANCE = 1.1
"""Largest / mean bytes below which the loads count as equal."""
LEAST_WAIT_RATIO = 0.02
"""Extra wait / step time below which no cause is reported."""


class LoadFinding(StrEnum):
    """The relation between the message sizes and the waits for experts."""

    CAUSE = "cause"
    """The rank with the most bytes waits least, and the others wait for it."""
    OPPOSITE = "opposite"
    """Loads are unequal, but the rank with the most bytes does not wait least."""
    EQUAL = "equal"
    """Ranks wait unequally and send equal amounts, so the cause is unknown."""
    NO_WAIT = "no_wait"
    """The ranks wait equally long."""
    ALONE = "alone"
    """Only one rank of each group was recorded."""


@dataclass(frozen=True, slots=True)
class ExpertRank:
    """One rank of a group of experts, in its typical step."""

    rank: int
    bytes_per_step: int
    """Sum of the messages along the dimension `ep`."""
    exposed_ns: int
    """Exposed time of these messages."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Ranks that exchange tokens with each other."""

    members: tuple[ExpertRank, ...]
    """The members, by rank."""
    busiest_rank: int
    """The member with the most bytes."""
    imbalance_ratio: float
    """Largest bytes of a member / mean bytes; 1.0 if all members are equal."""
    extra_wait_ns: int
    """Longest exposed time of a member - shortest exposed time of a member."""
    finding: LoadFinding


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of the groups of experts."""

    groups: tuple[ExpertGroup, ...]
    """The groups, largest extra wait first."""

    @property
    def worst(self) -> ExpertGroup:
        """The group whose ranks wait most unequally."""
        return self.groups[0]


def measure_expert_load(run: RunSource) -> ExpertLoad | None:
    """Compare the all-to-alls of the ranks that share experts.

    Returns:
        None if no rank exchanges tokens along the dimension `ep` in its typical step.
    """
    steps = measure_breakdown(run).ranks
    own = {
        step.rank: ExpertRank(step.rank, row.bytes_per_step, row.exposed_ns)
        for step in steps
        for row in step.dimensions
        if row.dimension == EXPERTS
    }
    if not own or not _exchanges_tokens(run, min(own)):
        return None
    groups: dict[tuple[int, ...], list[ExpertRank]] = defaultdict(list)
    for rank, member in sorted(own.items()):
        groups[dimension_members(run, EXPERTS, rank) or (rank,)].append(member)
    step_time = max(step.step_time_ns for step in steps)
    compared = [_compare(members, step_time) for members in groups.values()]
    return ExpertLoad(tuple(sorted(compared, key=lambda group: -group.extra_wait_ns)))


def _exchanges_tokens(run: RunSource, rank: int) -> bool:
    """Whether the rank issues all-to-alls."""
    return len(run.summary(ranks=[rank], kinds=[EventKind.ALL_TO_ALL])) > 0


def _compare(members: list[ExpertRank], step_time_ns: int) -> ExpertGroup:
    mean = sum(member.bytes_per_step for member in members) / len(members)
    busiest = max(members, key=lambda member: member.bytes_per_step)
    waits = [member.exposed_ns for member in members]
    imbalance = busiest.bytes_per_step / mean if mean else 1.0
    finding = LoadFinding.CAUSE
    if len(members) < 2:
        finding = LoadFinding.ALONE
    elif max(waits) - min(waits) < LEAST_WAIT_RATIO * step_time_ns:
        finding = LoadFinding.NO_WAIT
    elif imbalance < LEAST_IMBALANCE:
        finding = LoadFinding.EQUAL
    elif busiest.exposed_ns > min(waits):
        finding = LoadFinding.OPPOSITE
    return ExpertGroup(
        members=tuple(members),
        busiest_rank=busiest.rank,
        imbalance_ratio=imbalance,
        extra_wait_ns=max(waits) - min(waits),
        finding=finding,
    )
