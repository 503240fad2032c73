"""Collect the evidence that some ranks delay the others: their arrivals and their extra work.

The ranks are one rank (a straggler) or the ranks of one place (a slow group).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import LEAST_LATE_RATIO
from fsdp_inspect.analysis.stragglers.arrivals import NEVER, Arrivals
from fsdp_inspect.analysis.stragglers.rank_replay import RankPricing
from fsdp_inspect.analysis.stragglers.rank_work import MAX_CHANCE, RankWork, steps_to_tell
from fsdp_inspect.analysis.verdict import SlowGroup
from fsdp_inspect.formatting import format_ranks, format_ratio
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import EXPOSED_PART_CODES, PARTS_OF_STEP, Phase

LEAST_COST_RATIO = LEAST_LATE_RATIO
LEAST_BUSIEST_RATIO = 0.75
MAX_ERROR_RATIO = 0.05
"""The largest accepted error of a replay in its own steps. With a larger error, there is no
cost."""
OWN_PARTS = tuple(part for part in PARTS_OF_STEP if part not in EXPOSED_PART_CODES)
"""The parts of a step in which a rank does not wait for other ranks."""


@dataclass(frozen=True, slots=True)
class StragglerEvidence:
    """The measurements behind the search for a straggler or a slow group."""

    ranks: tuple[int, ...]
    """The compared ranks, ascending."""
    work: RankWork
    arrivals: Arrivals
    """The sampled collectives."""
    aligned: Arrivals
    """Those at which at least two ranks with aligned clocks arrive."""
    are_clocks_aligned: bool
    """Whether the clocks of all sampled ranks are aligned."""
    pricing: RankPricing
    uncertainty_ns: int
    step_time_ns: int
    """The typical step of the median rank."""
    parts_ns: NDArray[np.float64]
    """Each of `OWN_PARTS` in the typical step of each rank, shape (ranks, parts)."""
    between_ns: NDArray[np.float64]
    """Checkpoints and evaluation between the steps of each rank, per typical step."""
    read_message_waits: Callable[[], Mapping[int, int]]
    """Reads `message_waits_ns`, which needs a file of each rank, when it is needed."""

    @property
    def message_waits_ns(self) -> Mapping[int, int]:
        """Exposed sends and receives in the typical step, by rank; empty without sends.

        The replay does not connect the two sides of a message.
        """
        return self.read_message_waits()

    @property
    def least_cost_ns(self) -> float:
        """The smallest cost that matters."""
        return LEAST_COST_RATIO * self.step_time_ns

    def works_longest(self, ranks: Collection[int]) -> bool:
        """Return whether each of these ranks works longer than all others in most steps."""
        return self.work.num_longest(*ranks) >= LEAST_BUSIEST_RATIO * self.work.num_steps

    def are_waited_for(self, ranks: Collection[int]) -> bool:
        """Return whether the skew shows the extra work of these ranks, beyond the clocks' error.

        Ranks are also late at random. The skew at collectives at which other ranks are last shows
        how much. What these ranks cause beyond their part of that is at least half of their extra
        work.
        """
        shared = self._shared(ranks)
        if not shared.is_last_own.any():
            return False
        caused = shared.skew_ns[shared.is_last_own].sum()
        even = shared.even_ratio[~shared.is_last_own]
        at_random = shared.skew_ns[~shared.is_last_own] * even / np.maximum(1 - even, 1e-9)
        extra_ns = self.work.excess_ns(*ranks) * shared.num_steps
        if 2 * (caused - at_random.sum()) < extra_ns:
            return False
        late_ns = shared.late_ns[shared.is_last_own].mean()  # slow data is late once in a step
        return not self.are_clocks_aligned or late_ns > self.uncertainty_ns

    def last_ratio(self, ranks: Collection[int]) -> float:
        """Return the fraction of the collectives with other ranks at which one of these is last."""
        is_last_own = self._shared(ranks).is_last_own
        return float(is_last_own.mean()) if len(is_last_own) else 0.0

    def how_late(self, ranks: Collection[int]) -> tuple[int, str]:
        """Return the median delay when one of these ranks is last, and the phase with most delay.

        The delay is the last arrival - the median arrival of the other ranks. Without aligned
        clocks, it is the skew.
        """
        shared = self._shared(ranks)
        late, phase = shared.late_ns[shared.is_last_own], shared.phase[shared.is_last_own]
        if len(late) == 0:
            return 0, ""
        total = {one: int(late[phase == one].sum()) for one in np.unique(phase).tolist()}
        worst = max(total, key=lambda one: total[one])
        return median(late) or 0, Phase(worst).label

    def longest_part(self, ranks: Collection[int]) -> tuple[str, int]:
        """Return the part of the step that exceeds that of the other ranks most, and its excess."""
        is_own = np.isin(self.ranks, list(ranks))
        own, others = self.parts_ns[is_own], self.parts_ns[~is_own]
        extra = np.median(own, axis=0) - np.median(others, axis=0)
        longest = int(np.argmax(extra))
        return OWN_PARTS[longest].label, round(float(extra[longest]))

    def extra_between_ns(self, ranks: Collection[int]) -> int:
        """Return how much longer than the other ranks these work between steps, if it matters."""
        is_own = np.isin(self.ranks, list(ranks))
        own, others = self.between_ns[is_own], self.between_ns[~is_own]
        extra = round(float(np.median(own) - np.median(others)))
        return extra if extra >= self.least_cost_ns else 0

    def _shared(self, ranks: Collection[int]) -> "_Shared":
        """Return the collectives that these ranks share with other ranks."""
        if not self.are_clocks_aligned:
            return _read_durations(self.arrivals, ranks)
        is_own = np.isin(self.aligned.ranks, list(ranks))
        known = self.aligned.arrival_ns != NEVER
        both = known[:, is_own].any(axis=1) & known[:, ~is_own].any(axis=1)
        rows, known = self.aligned.where(both), known[both]
        others = np.sort(rows.arrival_ns[:, ~is_own], axis=1)
        unknown = (others == NEVER).sum(axis=1)
        middle = unknown + (others.shape[1] - unknown - 1) // 2
        return _Shared(
            is_last_own=is_own[rows.last()],
            skew_ns=rows.skew_ns(),
            even_ratio=known[:, is_own].sum(axis=1) / known.sum(axis=1),
            late_ns=rows.arrival_ns.max(axis=1, initial=NEVER)
            - others[np.arange(len(rows)), middle],
            phase=rows.rows.phase,
            num_steps=len(np.unique(rows.rows.step)),
        )


@dataclass(frozen=True, slots=True)
class _Shared:
    """The C collectives that some ranks share with other ranks."""

    is_last_own: NDArray[np.bool_]
    """Whether one of these ranks arrives last, shape (C,)."""
    skew_ns: NDArray[np.int64]
    even_ratio: NDArray[np.float64]
    """The fraction of the participants that are these ranks, shape (C,)."""
    late_ns: NDArray[np.int64]
    """Last arrival - median arrival of the other ranks, shape (C,)."""
    phase: NDArray[np.int8]
    num_steps: int
    """The steps of these collectives."""


def _read_durations(arrivals: Arrivals, ranks: Collection[int]) -> _Shared:
    """Read the last rank and the skew from durations, which need no aligned clocks.

    All ranks leave a collective together, so the last rank to arrive has the shortest one.
    """
    is_own = np.isin(arrivals.ranks, list(ranks))
    took_part = arrivals.took_part
    both = np.flatnonzero(took_part[:, is_own].any(axis=1) & took_part[:, ~is_own].any(axis=1))
    rows, took_part = arrivals.where(both), took_part[both]
    return _Shared(
        is_last_own=is_own[rows.shortest],
        skew_ns=rows.spread_ns,
        even_ratio=took_part[:, is_own].sum(axis=1) / took_part.sum(axis=1),
        late_ns=rows.spread_ns,
        phase=rows.rows.phase,
        num_steps=len(np.unique(rows.rows.step)),
    )


# --- Find the node, the TP group or the pipeline stage that the other ranks wait for.
#
# [Note: slow groups] A set of ranks with a common place is a slow group if all of these hold:
#
# - It has 2 or more ranks, and at most half of all ranks.
# - Each of its ranks works longer than every other rank, in at least three quarters of the steps
#   and in more steps than equal ranks would by chance ([Note: chance] in `rank_work`).
# - The ranks of the group are alike: the gap to the other ranks is at least as large as the
#   differences inside the group. Otherwise one rank of it may be slow, which is a straggler. A rank
#   that waits for a slow rank of its group does not work longer, because a wait is no work.
# - The other ranks wait for it: it causes most of the skew of the collectives that it shares with
#   them, as a straggler does. If it only exchanges messages with them, as a pipeline stage does,
#   the other ranks wait longer for messages, by at least half of its extra work.
# - It costs at least 2% of the typical step. The cost is the smallest of two replayed differences
#   and the extra work, as for a straggler. The replay needs aligned clocks, and it does not connect
#   sends and receives. Without clocks, and in a run with sends, the cost is an upper bound: the
#   extra work.
#
# [Note: slow nodes] If a node is late at every collective, its clock cannot be aligned: its
# lateness and an offset of its clock look the same. Whether the others wait for it then follows
# from durations of collectives. They are shortest on the ranks that arrive last.

Sets = Mapping[frozenset[int], tuple[str, ...]]


def find_slow_group(evidence: StragglerEvidence, sets: Sets) -> tuple[SlowGroup | None, str | None]:
    """Return the slow group, or the reason why it is unknown; see [Note: slow groups].

    Args:
        evidence: The measurements.
        sets: Sets of ranks with their names.
    """
    if evidence.work.num_steps == 0:
        return None, None
    tested = [set_ for set_ in sets if 1 < len(set_) <= len(evidence.ranks) / 2]
    ranks = _find_suspects(evidence, tested)
    if not ranks:
        return None, None
    refusal = _judge_chance(evidence, ranks, len(tested))
    if refusal is not None:
        return None, refusal
    if not (evidence.are_waited_for(ranks) or _is_waited_for_by_messages(evidence, ranks)):
        return None, None
    bound = _why_bound(evidence)
    cost, refusal = evidence.work.excess_ns(*ranks), None
    if not bound:
        cost, refusal = _replay_cost(evidence, ranks, cost)
    if refusal is not None or cost < evidence.least_cost_ns:
        return None, refusal
    return _describe(evidence, ranks, sets[frozenset(ranks)], cost, bound), None


def _find_suspects(evidence: StragglerEvidence, tested: Sequence[frozenset[int]]) -> list[int]:
    """Return the set with the largest gap to the other ranks, if it matters; empty: none."""
    work, least = evidence.work, evidence.least_cost_ns
    gaps: dict[frozenset[int], int] = {}
    for members in tested:
        gap = work.gap_ns(*members)
        if gap > 0 and gap >= work.spread_ns(*members) and work.excess_ns(*members) >= least:
            gaps[members] = gap
    suspects = [members for members in gaps if evidence.works_longest(members)]
    return sorted(max(suspects, key=lambda members: gaps[members], default=()))


def _judge_chance(evidence: StragglerEvidence, ranks: Sequence[int], num_sets: int) -> str | None:
    """Return why chance may explain the extra work; None: it does not."""
    work = evidence.work
    chance = work.chance(*ranks, num_sets=num_sets)
    if chance <= MAX_CHANCE:
        return None
    needed = steps_to_tell(work, *ranks, num_sets=num_sets)
    return (
        f"each of {format_ranks(ranks)} works longer than every other rank in "
        f"{work.num_longest(*ranks)} of {work.num_steps} steps. Among equal ranks, a set of ranks "
        f"with a common position does so by chance in up to {format_ratio(chance)} of runs. "
        f"Record {needed}."
    )


def _is_waited_for_by_messages(evidence: StragglerEvidence, ranks: Sequence[int]) -> bool:
    """Return whether the other ranks wait longer for messages, by half of the extra work."""
    waits = evidence.message_waits_ns
    own = median([waits.get(rank, 0) for rank in ranks]) or 0
    others = median([wait for rank, wait in waits.items() if rank not in ranks]) or 0
    return bool(waits) and 2 * (others - own) >= evidence.work.excess_ns(*ranks)


def _why_bound(evidence: StragglerEvidence) -> str:
    """Return why the extra work is only an upper bound of the cost; empty: the cost is replayed."""
    if evidence.message_waits_ns:
        return "sends and receives between ranks cannot be replayed"
    if not evidence.are_clocks_aligned:
        return "the clocks of the ranks cannot be aligned"
    return ""


def _replay_cost(
    evidence: StragglerEvidence, ranks: Sequence[int], excess_ns: int
) -> tuple[int, str | None]:
    """Return the cost of the extra work, or the reason why it is unknown."""
    priced, replay = evidence.pricing.without(ranks), evidence.pricing.result
    if priced is None or replay is None:
        return 0, (
            f"each of {format_ranks(ranks)} works longer than every other rank, but the cost is "
            "unknown: their steps cannot be replayed."
        )
    cost = min(priced.cost_ns, excess_ns)
    is_small = cost < replay.error_ratio * evidence.step_time_ns
    if cost >= evidence.least_cost_ns and (replay.error_ratio > MAX_ERROR_RATIO or is_small):
        return 0, (
            f"the cost of {format_ranks(ranks)} is unknown, because the replay misses the recorded "
            f"step by {format_ratio(replay.error_ratio)}."
        )
    return cost, None


def _describe(
    evidence: StragglerEvidence,
    ranks: Sequence[int],
    names: tuple[str, ...],
    cost_ns: int,
    bound: str,
) -> SlowGroup:
    late_ns, phase = evidence.how_late(ranks)
    meanwhile, meanwhile_ns = evidence.longest_part(ranks)
    return SlowGroup(
        names=names,
        ranks=tuple(ranks),
        busiest_ratio=evidence.work.num_longest(*ranks) / evidence.work.num_steps,
        last_ratio=evidence.last_ratio(ranks),
        late_ns=late_ns,
        phase=phase,
        meanwhile=meanwhile,
        meanwhile_ns=meanwhile_ns,
        cost_ns=cost_ns,
        bound_because=bound,
        cost_ratio=cost_ns / evidence.step_time_ns,
        between_ns=evidence.extra_between_ns(ranks),
    )
