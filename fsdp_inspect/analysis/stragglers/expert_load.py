"""Compare the load of the ranks that share experts, and judge whether it explains their waits.

An all-to-all ends when the last rank has sent its part. So ranks with few tokens wait for the rank
whose experts receive most. The recorded evidence is the number of bytes that each rank sends.
Equal sizes are no evidence of equal load: some routers pad every message.

[Note: directions of all-to-alls] A layer has two all-to-alls. The first sends a rank's own tokens
to the experts, the second sends the results of its experts back. A rank sends back as many elements
as its experts received, so the second message is the load of its experts. Both messages have the
same number of elements over all ranks. So among the messages of a forward with the same total, own
tokens and results alternate, beginning with own tokens. This needs all ranks of the group and the
size of every message. An odd number of messages has no directions, and messages of whole numbers,
such as counts of tokens, are left out. Without directions, the sum of all messages is the evidence:
it contains the load, but also a rank's own tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.breakdown import measure_dimensions
from fsdp_inspect.analysis.mesh_dimensions import dimension_members, group_dimensions
from fsdp_inspect.analysis.step_selection import timed_ranks
from fsdp_inspect.analysis.stragglers.rank_work import common_steps, spread
from fsdp_inspect.analysis.wait_causes import NEEDED_KINDS, split_waits
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, EventKind, Phase
from fsdp_inspect.trace.run import RunSource

EXPERTS = "ep"
LEAST_IMBALANCE = 1.1
"""Largest / mean bytes below which the loads count as equal."""
LEAST_WAIT_RATIO = 0.02
"""Extra wait / step time below which no cause is reported."""
MAX_SAMPLED_STEPS = 4
MAX_SAMPLED_GROUPS = 8
_COUNTS = ("int32", "int64")
"""Dtypes of messages that tell each other how many tokens follow."""


class LoadFinding(StrEnum):
    """The relation between the message sizes and the waits for experts."""

    CAUSE = "cause"
    """The rank whose experts have the largest load waits least, and the others wait for it."""
    OWN_TOKENS = "own_tokens"
    """The rank with the most tokens of its own waits least: its batches are larger, not the load of
    its experts."""
    OPPOSITE = "opposite"
    """Loads are unequal, but the rank with the most bytes does not wait least."""
    EQUAL = "equal"
    """Ranks wait unequally and send equal amounts, so the cause is unknown."""
    NO_SIZES = "no_sizes"
    """Ranks wait unequally, and the sizes of the messages are unknown."""
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
    own_bytes: int | None = None
    """Bytes of its own tokens, which it sends to the experts in forward. None if the directions are
    unknown: see [Note: directions of all-to-alls]."""
    expert_bytes: int | None = None
    """Bytes of the results that it sends back in forward: the load of its experts."""
    own_exposed_ns: int = 0
    """Exposed time of the messages with own tokens."""
    expert_exposed_ns: int = 0
    """Exposed time of the messages with results."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Ranks that exchange tokens with each other."""

    members: tuple[ExpertRank, ...]
    """The members, by rank."""
    busiest_rank: int
    """The member with the largest load: bytes of results, or of all messages without directions.
    For `own_tokens`, the member with the most tokens of its own."""
    imbalance_ratio: float
    """The bytes of that member / mean bytes; 1.0 if all are equal."""
    extra_wait_ns: int
    """Longest exposed time of a member - shortest exposed time of a member."""
    finding: LoadFinding
    are_directions_known: bool


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

    It reads the events of at most `MAX_SAMPLED_GROUPS` groups, those with the largest extra wait,
    in `MAX_SAMPLED_STEPS` timed steps.

    Returns:
        None if no rank exchanges tokens along the dimension `ep` in its typical step.
    """
    own = {
        rank: ExpertRank(rank, row.bytes_per_step, row.exposed_ns)
        for rank, dimensions in measure_dimensions(run).items()
        for row in dimensions
        if row.dimension == EXPERTS
    }
    if not own or not _exchanges_tokens(run, min(own)):
        return None
    groups: dict[tuple[int, ...], list[ExpertRank]] = defaultdict(list)
    for rank, member in sorted(own.items()):
        groups[dimension_members(run, EXPERTS, rank) or (rank,)].append(member)
    step_time = int(timed_ranks(run).typical.step_time_ns.max())
    timed = [member for member in timed_ranks(run).members if member.rank in own]
    sampled = spread(common_steps(timed), MAX_SAMPLED_STEPS)
    ordered = sorted(groups.items(), key=lambda group: -_extra_wait(group[1]))
    compared = []
    for place, (ranks, members) in enumerate(ordered):
        is_whole = len(members) == len(ranks) > 1 and place < MAX_SAMPLED_GROUPS
        messages = _read_messages(run, members, sampled) if is_whole and sampled else None
        compared.append(_compare(members, messages, step_time))
    return ExpertLoad(tuple(compared))


def _exchanges_tokens(run: RunSource, rank: int) -> bool:
    """Whether the rank issues all-to-alls."""
    return len(run.summary(ranks=[rank], kinds=[EventKind.ALL_TO_ALL])) > 0


def _extra_wait(members: Sequence[ExpertRank]) -> int:
    waits = [member.exposed_ns for member in members]
    return max(waits) - min(waits)


@dataclass(frozen=True, slots=True)
class _Messages:
    """The all-to-alls of a group in the forwards of the sampled steps."""

    members: tuple[ExpertRank, ...]
    """The members, with the bytes of both directions per step if the directions are known."""
    are_sizes_known: bool
    are_directions_known: bool


@dataclass(frozen=True, slots=True)
class _Sent:
    """The all-to-alls of one rank in one step, in the order of their issue; shape (n,)."""

    elements: NDArray[np.int64]
    bytes: NDArray[np.int64]
    exposed_ns: NDArray[np.int64]


def _read_messages(
    run: RunSource, members: Sequence[ExpertRank], steps: Sequence[int]
) -> _Messages:
    """Read the messages of all ranks of a group, with their directions."""
    sent = [_read_rank(run, member.rank, steps) for member in members]
    are_sizes_known = all(np.all(step.bytes >= 0) for own in sent for step in own)
    are_results = [_find_results([own[at] for own in sent]) for at in range(len(steps))]
    if not are_sizes_known or any(mask is None for mask in are_results):
        return _Messages(tuple(members), are_sizes_known, False)
    known = [mask for mask in are_results if mask is not None]
    directed = tuple(
        _with_directions(member, own, known) for member, own in zip(members, sent, strict=True)
    )
    return _Messages(directed, True, True)


def _read_rank(run: RunSource, rank: int, steps: Sequence[int]) -> list[_Sent]:
    """Read the messages of one rank in the forward of each step."""
    dimensions = group_dimensions(run, rank)
    waits = split_waits(run.events(rank, steps=steps, kinds=sorted(NEEDED_KINDS)))
    rows, exposed = waits.collectives, waits.share_by_cause_ns.sum(axis=1)
    labels = {group: dimensions.label(group) for group in np.unique(rows.group).tolist()}
    counts = [place for place, name in enumerate(DTYPES) if name in _COUNTS]
    chosen = (
        (rows.kind == EventKind.ALL_TO_ALL)
        & np.isin(rows.group, [group for group, label in labels.items() if label == EXPERTS])
        & ~np.isin(rows.phase, [Phase.BACKWARD, Phase.EVALUATION])
        & ~np.isin(rows.dtype, counts)
    )
    sizes = np.array([ITEMSIZE.get(name, 1) for name in DTYPES], dtype=np.int64)
    found = []
    for step in steps:
        own = np.flatnonzero(chosen & (rows.step == step))
        own = own[np.argsort(rows.sequence[own], kind="stable")]
        found.append(
            _Sent(rows.bytes[own] // sizes[rows.dtype[own]], rows.bytes[own], exposed[own])
        )
    return found


def _find_results(sent: Sequence[_Sent]) -> NDArray[np.bool_] | None:
    """Find the messages that send results back, of all ranks of a group in one step.

    Returns:
        Shape (n,); None if the directions are unknown. See [Note: directions of all-to-alls].
    """
    count = len(sent[0].elements)
    if count == 0 or any(len(own.elements) != count for own in sent):
        return None
    totals = np.sum([own.elements for own in sent], axis=0)
    are_results = np.zeros(count, dtype=bool)
    for total in np.unique(totals).tolist():
        alike = np.flatnonzero(totals == total)
        if len(alike) % 2:
            return None
        are_results[alike[1::2]] = True
    return are_results


def _with_directions(
    member: ExpertRank, sent: Sequence[_Sent], are_results: Sequence[NDArray[np.bool_]]
) -> ExpertRank:
    """Add the messages of both directions to a rank: means over the steps."""

    def mean(name: str, *, of_results: bool) -> int:
        return sum(
            int(getattr(step, name)[mask == of_results].sum())
            for step, mask in zip(sent, are_results, strict=True)
        ) // len(sent)

    return ExpertRank(
        member.rank,
        member.bytes_per_step,
        member.exposed_ns,
        own_bytes=mean("bytes", of_results=False),
        expert_bytes=mean("bytes", of_results=True),
        own_exposed_ns=mean("exposed_ns", of_results=False),
        expert_exposed_ns=mean("exposed_ns", of_results=True),
    )


@dataclass(frozen=True, slots=True)
class _Imbalance:
    """The member with most bytes of a direction."""

    rank: int
    ratio: float
    """Its bytes / mean bytes."""
    waits_least: bool
    """Whether no other member waits less for these messages."""

    @classmethod
    def of(
        cls, members: Sequence[ExpertRank], sizes: Sequence[int], waits: Sequence[int]
    ) -> "_Imbalance":
        """Compare the members."""
        busiest = int(np.argmax(sizes))
        mean = sum(sizes) / len(sizes)
        return cls(
            members[busiest].rank,
            sizes[busiest] / mean if mean else 1.0,
            waits[busiest] <= min(waits),
        )

    @property
    def is_uneven(self) -> bool:
        """Whether the bytes differ by enough to count."""
        return self.ratio >= LEAST_IMBALANCE


def _compare(
    members: Sequence[ExpertRank], messages: _Messages | None, step_time_ns: int
) -> ExpertGroup:
    is_directed = messages is not None and messages.are_directions_known
    rows = list(messages.members) if messages is not None else list(members)
    waits = [row.exposed_ns for row in rows]
    load = _Imbalance.of(rows, [row.bytes_per_step for row in rows], waits)
    tokens = None
    if is_directed:
        load = _Imbalance.of(
            rows, [row.expert_bytes or 0 for row in rows], [row.expert_exposed_ns for row in rows]
        )
        tokens = _Imbalance.of(
            rows, [row.own_bytes or 0 for row in rows], [row.own_exposed_ns for row in rows]
        )
    extra = max(waits) - min(waits)
    finding = LoadFinding.EQUAL
    if len(rows) < 2:
        finding = LoadFinding.ALONE
    elif extra < LEAST_WAIT_RATIO * step_time_ns:
        finding = LoadFinding.NO_WAIT
    elif not any(row.bytes_per_step for row in rows) or (
        messages is not None and not messages.are_sizes_known
    ):
        finding = LoadFinding.NO_SIZES
    elif load.is_uneven and load.waits_least:
        finding = LoadFinding.CAUSE
    elif tokens is not None and tokens.is_uneven and tokens.waits_least:
        finding, load = LoadFinding.OWN_TOKENS, tokens
    elif load.is_uneven:
        finding = LoadFinding.OPPOSITE
    return ExpertGroup(
        members=tuple(rows),
        busiest_rank=load.rank,
        imbalance_ratio=load.ratio,
        extra_wait_ns=extra,
        finding=finding,
        are_directions_known=is_directed,
    )
