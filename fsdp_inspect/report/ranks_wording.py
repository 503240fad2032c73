"""Describe the comparison of a run's ranks in sentences that all reports share.

The text is plain: each report escapes it for its format.
"""

from collections.abc import Sequence

from fsdp_inspect.analysis.expert_load import ExpertLoad, LoadFinding
from fsdp_inspect.analysis.mesh_grid import MeshGrid
from fsdp_inspect.analysis.stragglers.rank_pricing import StepReplay
from fsdp_inspect.analysis.stragglers.ranks import (
    LEAST_BUSIEST_RATIO,
    LEAST_COST_RATIO,
    RankRow,
    Ranks,
    Straggler,
)
from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.values import format_metric

_NO_STRAGGLER = "No rank is a straggler."
_DEFINITION = (
    f"A straggler has the most own work in at least {format_ratio(LEAST_BUSIEST_RATIO)} of the "
    f"steps, delays the other ranks, and costs at least {format_ratio(LEAST_COST_RATIO)} of a step."
)


def describe_answer(ranks: Ranks) -> tuple[str, ...]:
    """Describe the straggler and its cost, or that there is none; the headline first."""
    if ranks.straggler is not None and ranks.replay is not None:
        lines = [
            _straggler(ranks.straggler),
            _meanwhile(ranks.straggler),
            _replay(ranks.replay, ranks.straggler),
        ]
    else:
        lines = [_no_straggler(ranks)]
        if ranks.replay is not None and lines[0] == _NO_STRAGGLER:
            lines.append(_DEFINITION)
        if ranks.replay is not None:
            lines.append(_imbalance(ranks, ranks.replay))
    if ranks.expert_load is not None:
        lines.append(describe_expert_load(ranks.expert_load))
    if ranks.skewed_ratio is not None:
        lines.append(
            "The skew is longer than the transfer at "
            f"{format_metric('skewed_ratio', ranks.skewed_ratio)} of the collectives."
        )
    return tuple(lines)


def describe_expert_load(load: ExpertLoad) -> str:
    """Describe whether unequal load of the experts explains waits, as far as messages show it."""
    worst = load.worst
    waits = f"Ranks that share experts wait up to {format_ns(worst.extra_wait_ns)} longer per step"
    busiest = (
        f"rank {worst.busiest_rank} sends {worst.imbalance_ratio:.2f} times the mean bytes in "
        "its all-to-alls"
    )
    match worst.finding:
        case LoadFinding.CAUSE:
            return (
                f"{waits} than each other. Likely cause: load imbalance of the experts, because "
                f"{busiest} and waits least. Balance the tokens per expert."
            )
        case LoadFinding.OPPOSITE:
            return (
                f"{waits} than each other. The load of the experts does not explain it: {busiest}, "
                "but does not wait least."
            )
        case LoadFinding.EQUAL:
            return (
                f"{waits} than each other. The cause is unknown: their all-to-alls carry the same "
                "number of bytes, so a load imbalance cannot be distinguished from other causes."
            )
        case LoadFinding.NO_WAIT:
            return "Ranks that share experts wait equally long for their all-to-alls."
        case LoadFinding.ALONE:
            return "The load of the experts is unknown: one rank of each group was recorded."


def describe_location(grid: MeshGrid) -> str:
    """Describe which ranks of the mesh have the highest values; or that none stands out."""
    label = find_metric(grid.metric).label
    found = grid.located
    if found is None:
        return f"No node, group or stage stands out by {label}."
    name, *others = found.names
    also = f" (also {', '.join(others)})" if others else ""
    return (
        f"Highest {label}: {name}{also}. Its median is {format_metric(grid.metric, found.median)}; "
        f"that of all other ranks is {format_metric(grid.metric, found.other_median)}."
    )


def describe_rank(row: RankRow) -> str:
    """Describe the step, the exposed waits, the own work and the arrivals of one rank."""
    where = f" ({row.host})" if row.host else ""
    arrives = ""
    if row.last_ratio is not None:
        arrives = (
            f" It arrives last at {format_metric('last_ratio', row.last_ratio)} of the "
            f"collectives, {format_metric('lateness_ns', row.lateness_ns)} after the first rank "
            "(median)."
        )
    return (
        f"Rank {row.rank}{where}: {format_metric('step_time_ns', row.step_time_ns)} a step, of "
        f"which {format_metric('exposed_ns', row.exposed_ns)} exposed and "
        f"{format_metric('own_work_ns', row.own_work_ns)} own work.{arrives}"
    )


def _straggler(straggler: Straggler) -> str:
    where = f" ({straggler.host})" if straggler.host else ""
    return (
        f"Rank {straggler.rank}{where} is a straggler and costs "
        f"{format_metric('cost_ns', straggler.cost_ns)} a step."
    )


def _meanwhile(straggler: Straggler) -> str:
    return (
        f"It arrives last at {format_metric('last_ratio', straggler.last_ratio)} of the "
        f"collectives, {format_metric('late_ns', straggler.late_ns)} after the median rank, mostly "
        f"in {straggler.phase}. Its {straggler.meanwhile.replace('_', ' ')} takes "
        f"{format_metric('meanwhile_ns', straggler.meanwhile_ns)} longer per step than on other "
        f"ranks. The cost is {format_metric('cost_ratio', straggler.cost_ratio)} of the step."
    )


def _replay(replay: StepReplay, straggler: Straggler) -> str:
    return (
        f"Predicted: if rank {straggler.rank} worked as long as rank {straggler.like_rank}, "
        f"{_steps(replay.steps)} would take "
        f"{format_metric('step_time_ns', replay.replayed_ns - straggler.cost_ns)} a step instead "
        f"of {format_metric('step_time_ns', replay.replayed_ns)}. {_self_check(replay)}"
    )


def _self_check(replay: StepReplay) -> str:
    """State the error of the replay on the recorded steps."""
    return (
        "Self-check: the replay differs from the recorded steps by "
        f"{format_metric('error_ratio', replay.error_ratio)}. The error of the replay with changed "
        "work is unknown."
    )


def _no_straggler(ranks: Ranks) -> str:
    if not ranks.ranks:
        return "Ranks cannot be compared: the run has no timed step."
    if len(ranks.ranks) == 1:
        return "Ranks cannot be compared: the run folder has one rank only."
    if ranks.straggler_refusal is not None:
        return f"It is unknown whether there is a straggler: {ranks.straggler_refusal}"
    if ranks.replay is not None:
        return _NO_STRAGGLER
    least = _waits_least(ranks.ranks)
    if least is None:
        return "It is unknown whether there is a straggler: no collective of two ranks matches."
    return (
        f"The cost of a straggler is unknown. Rank {least.rank} waits least: "
        f"{format_metric('shortest_ratio', least.shortest_ratio)} of the collectives are shortest "
        "on this rank. It probably arrives last."
    )


def _waits_least(rows: Sequence[RankRow]) -> RankRow | None:
    known = [row for row in rows if row.shortest_ratio is not None]
    return max(known, key=lambda row: row.shortest_ratio or 0.0, default=None)


def _imbalance(ranks: Ranks, replay: StepReplay) -> str:
    return (
        f"Imbalance costs {format_metric('imbalance_ns', ranks.imbalance_ns)} a step, compared "
        f"with a replay of {_steps(replay.steps)} in which all ranks have equal work. This "
        f"includes random differences between the ranks. {_self_check(replay)}"
    )


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def describe_comparing(ranks: Ranks) -> str:
    """Describe how the ranks were compared, one sentence a line."""
    lines = ["Times are measured. They are those of the typical step of each rank."]
    if ranks.sampled_ranks and ranks.sampled_steps:
        lines.append(
            f"Collectives: {len(ranks.sampled_ranks)} of {len(ranks.ranks)} ranks in "
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
