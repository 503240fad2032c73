"""How are the ranks of a run against each other put into words?

The text is plain: whoever shows it escapes it for the place where it is shown.
"""

from collections.abc import Sequence

from fsdp_inspect.analysis.stragglers.rank_pricing import StepReplay
from fsdp_inspect.analysis.stragglers.ranks import LEAST_COST_RATIO, RankRow, Ranks, Straggler
from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.values import format_metric


def describe_answer(ranks: Ranks) -> tuple[str, ...]:
    """Whether there is a straggler and what it costs, the answer first."""
    if ranks.straggler is not None and ranks.replay is not None:
        lines = [
            _straggler(ranks.straggler),
            _meanwhile(ranks.straggler),
            _replay(ranks.replay, ranks.straggler),
        ]
    else:
        lines = [_no_straggler(ranks)]
        if ranks.replay is not None:
            lines.append(_imbalance(ranks, ranks.replay))
    if ranks.skewed_ratio is not None:
        lines.append(
            "Ranks arrive further apart than the transfer takes at "
            f"{format_metric('skewed_ratio', ranks.skewed_ratio)} of the collectives."
        )
    return tuple(lines)


def describe_rank(row: RankRow) -> str:
    """One rank in a line: its step, its waiting, its own work, and when it arrives."""
    where = f" ({row.host})" if row.host else ""
    arrives = ""
    if row.last_ratio is not None:
        arrives = (
            f" It arrives last at {format_metric('last_ratio', row.last_ratio)} of the "
            f"collectives, typically {format_metric('lateness_ns', row.lateness_ns)} after the "
            "first rank."
        )
    return (
        f"Rank {row.rank}{where} takes {format_metric('step_time_ns', row.step_time_ns)} a step, "
        f"waits {format_metric('exposed_ns', row.exposed_ns)} of it for the others and works "
        f"{format_metric('own_work_ns', row.own_work_ns)} itself.{arrives}"
    )


def _straggler(straggler: Straggler) -> str:
    where = f" ({straggler.host})" if straggler.host else ""
    return (
        f"Rank {straggler.rank}{where} is a straggler: it arrives last at "
        f"{format_metric('last_ratio', straggler.last_ratio)} of the collectives, and costs "
        f"{format_metric('cost_ns', straggler.cost_ns)} of each step "
        f"({format_metric('cost_ratio', straggler.cost_ratio)})."
    )


def _meanwhile(straggler: Straggler) -> str:
    return (
        f"Where it is last, it comes {format_metric('late_ns', straggler.late_ns)} after the rank "
        f"in the middle, most of all in {straggler.phase}. Meanwhile: its "
        f"{straggler.meanwhile.replace('_', ' ')} takes "
        f"{format_metric('meanwhile_ns', straggler.meanwhile_ns)} longer per step than the others'."
    )


def _replay(replay: StepReplay, straggler: Straggler) -> str:
    return (
        f"Predicted: without what rank {straggler.rank} regularly works longer than rank "
        f"{straggler.like_rank}, {_steps(replay.steps)} take "
        f"{format_metric('step_time_ns', replay.replayed_ns - straggler.cost_ns)} a step instead "
        f"of {format_metric('step_time_ns', replay.replayed_ns)}. {_self_check(replay)}"
    )


def _self_check(replay: StepReplay) -> str:
    """What the replay's agreement with its own steps says, and what it does not."""
    return (
        "Self-check: the replay gives the steps that it was read from to within "
        f"{format_metric('error_ratio', replay.error_ratio)}, so their order is understood; how "
        "far a changed step would be off is not known."
    )


def _no_straggler(ranks: Ranks) -> str:
    if not ranks.ranks:
        return "No step counts yet, so no rank can be compared."
    if len(ranks.ranks) == 1:
        return "Only one rank is in this run folder: there is no other to compare it with."
    if ranks.straggler_refusal is not None:
        return f"Whether there is a straggler cannot be told: {ranks.straggler_refusal}"
    if ranks.replay is not None:
        return (
            "No straggler: no rank works longest in three quarters of the steps, makes the others "
            f"wait and costs {format_ratio(LEAST_COST_RATIO)} of a step."
        )
    least = _waits_least(ranks.ranks)
    if least is None:
        return "Whether there is a straggler is not known: no collective of two ranks matches."
    return (
        f"What a straggler costs is not known. Rank {least.rank} waits least: "
        f"{format_metric('shortest_ratio', least.shortest_ratio)} of the collectives are shortest "
        "on it, which is a sign of arriving last."
    )


def _waits_least(rows: Sequence[RankRow]) -> RankRow | None:
    known = [row for row in rows if row.shortest_ratio is not None]
    return max(known, key=lambda row: row.shortest_ratio or 0.0, default=None)


def _imbalance(ranks: Ranks, replay: StepReplay) -> str:
    return (
        f"All lateness together costs {format_metric('imbalance_ns', ranks.imbalance_ns)} of a "
        f"step of {format_metric('step_time_ns', replay.replayed_ns)}: replayed with every rank "
        f"working alike (predicted from {_steps(replay.steps)}), chance differences included. "
        f"{_self_check(replay)}"
    )


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def describe_comparing(ranks: Ranks) -> str:
    """How the ranks were compared, one sentence a line."""
    lines = ["Times of ranks: measured, the typical step of each."]
    if ranks.sampled_ranks and ranks.sampled_steps:
        lines.append(
            f"Collectives: of {len(ranks.sampled_ranks)} of {len(ranks.ranks)} ranks in "
            f"{len(ranks.sampled_steps)} timed steps, matched by process group and number. "
            f"Transfer: {find_metric('pure_transfer_ns').definition}."
        )
    if ranks.clock_uncertainty_ns is not None:
        error = ranks.clock_uncertainty_ns
        lines.append(
            "The ranks share one clock."
            if error == 0
            else f"Clocks are aligned to within {format_ns(error)}."
        )
    return "\n".join(lines)
