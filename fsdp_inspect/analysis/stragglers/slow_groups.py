"""Find the node, the TP group or the pipeline stage that the other ranks wait for.

[Note: slow groups] A set of ranks with a common place is a slow group if all of these hold:

- It has 2 or more ranks, and at most half of all ranks.
- Each of its ranks works longer than every other rank, in at least three quarters of the steps and
  in more steps than equal ranks would by chance ([Note: chance] in `rank_work`).
- The ranks of the group are alike: the gap to the other ranks is at least as large as the
  differences inside the group. Otherwise one rank of it may be slow, which is a straggler. A rank
  that waits for a slow rank of its group does not work longer, because a wait is no work.
- The other ranks wait for it: it causes most of the skew of the collectives that it shares with
  them, as a straggler does. If it only exchanges messages with them, as a pipeline stage does, the
  other ranks wait longer for messages, by at least half of its extra work.
- It costs at least 2% of the typical step. The cost is the smallest of two replayed differences and
  the extra work, as for a straggler. The replay needs aligned clocks, and it does not connect sends
  and receives. Without clocks, and in a run with sends, the cost is an upper bound: the extra work.

[Note: slow nodes] If a node is late at every collective, its clock cannot be aligned: its lateness
and an offset of its clock look the same. Whether the others wait for it then follows from durations
of collectives. They are shortest on the ranks that arrive last.
"""

from collections.abc import Mapping, Sequence

from fsdp_inspect.analysis.stragglers.evidence import MAX_ERROR_RATIO, StragglerEvidence
from fsdp_inspect.analysis.stragglers.rank_work import MAX_CHANCE, steps_to_tell
from fsdp_inspect.analysis.verdict import SlowGroup
from fsdp_inspect.formatting import format_ranks, format_ratio
from fsdp_inspect.statistics import median

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
    needed = steps_to_tell(work.num_ranks, size=len(ranks), num_sets=num_sets)
    return (
        f"each of {format_ranks(ranks)} works longer than every other rank in "
        f"{work.num_longest(*ranks)} of {work.num_steps} steps. Among equal ranks, a set of ranks "
        f"with a common position does so by chance in up to {format_ratio(chance)} of runs. "
        f"Record at least {needed} timed steps."
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
    cost = min(priced[0], excess_ns)
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
    )
