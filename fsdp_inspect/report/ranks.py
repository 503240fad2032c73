"""How do the ranks of a run read in a terminal? Who is late and what it costs, then the tables.

Nothing is computed here. Names from the run are put in as plain text, never as rich markup.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.ranks import (
    LEAST_COST_RATIO,
    CollectiveSkew,
    RankRow,
    Ranks,
    Straggler,
)
from fsdp_inspect.formatting import MISSING, format_ns, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.values import format_kind, format_metric
from fsdp_inspect.trace.rank_pricing import StepReplay

MOST_RANKS = 16
MOST_SKEWS = 8


def render_ranks(ranks: Ranks, *, rank: int | None = None) -> RenderableType:
    """The straggler and its price, the skew of the collectives, every rank.

    Args:
        ranks: What was measured.
        rank: Show this one only; default the most telling ones.
    """
    shown = _choose(ranks.ranks, rank)
    parts: list[RenderableType] = [*_answer(ranks)]
    parts.extend(Text(f"note: {refusal}", style="yellow") for refusal in _shorten(ranks.refusals))
    if shown:
        parts.extend(
            ["", Text(_ranks_title(ranks.ranks, shown), style="bold"), _ranks_table(shown)]
        )
    if ranks.skews and rank is None:
        parts.extend(["", Text(_skews_title(ranks), style="bold")])
        parts.append(_skews_table(ranks.skews[:MOST_SKEWS]))
    parts.extend(["", Text(_provenance(ranks), style="dim")])
    return Group(*parts)


# --- in words


def _answer(ranks: Ranks) -> Iterable[RenderableType]:
    if ranks.straggler is not None and ranks.replay is not None:
        yield Text(_straggler(ranks.straggler), style="bold")
        yield _indented(_meanwhile(ranks.straggler))
        yield _indented(_replayed(ranks.replay, ranks.straggler))
    else:
        yield Text(_no_straggler(ranks), style="bold")
        if ranks.replay is not None:
            yield _indented(_imbalance(ranks, ranks.replay))
    if ranks.skewed_ratio is not None:
        yield _indented(
            "Ranks arrive further apart than the transfer takes at "
            f"{format_metric('skewed_ratio', ranks.skewed_ratio)} of the collectives."
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


def _replayed(replay: StepReplay, straggler: Straggler) -> str:
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


def _shorten(refusals: Sequence[str]) -> Iterable[str]:
    yield from refusals[:MOST_SKEWS]
    if len(refusals) > MOST_SKEWS:
        yield f"and {len(refusals) - MOST_SKEWS} further ones; --json lists them."


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


def _provenance(ranks: Ranks) -> str:
    lines = ["Times of ranks: measured, medians over their timed steps."]
    if ranks.sampled_ranks and ranks.sampled_steps:
        lines.append(
            f"Collectives: of {len(ranks.sampled_ranks)} of {len(ranks.ranks)} ranks in "
            f"{len(ranks.sampled_steps)} timed steps, matched by process group and number. "
            f"transfer: {find_metric('pure_transfer_ns').definition}."
        )
    if ranks.clock_uncertainty_ns is not None:
        error = ranks.clock_uncertainty_ns
        lines.append(
            "The ranks share one clock."
            if error == 0
            else f"Clocks are aligned to within {format_ns(error)}."
        )
    return "\n".join(lines)


# --- in tables


def _choose(rows: Sequence[RankRow], rank: int | None) -> list[RankRow]:
    """The asked rank; or all; or, of many, those that work longest and those that work least."""
    if rank is not None:
        return [row for row in rows if row.rank == rank]
    if len(rows) <= MOST_RANKS:
        return list(rows)
    ordered = sorted(rows, key=lambda row: -row.own_work_ns)
    return [*ordered[: MOST_RANKS // 2], *ordered[-MOST_RANKS // 2 :]]


def _ranks_title(rows: Sequence[RankRow], shown: Sequence[RankRow]) -> str:
    if len(shown) == len(rows):
        return "Ranks (medians per step)"
    if len(shown) == 1:
        return f"Rank {shown[0].rank} (medians per step)"
    half = len(shown) // 2
    return f"The {half} of {len(rows)} ranks that work longest, and the {half} that work least"


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for position, header in enumerate(headers):
        table.add_column(header, justify="left" if position == 0 else "right", no_wrap=True)
    return table


def _ranks_table(rows: Sequence[RankRow]) -> Table:
    table = _table("rank", "step", "own work", "exposed", "overlap", "last", "late", "peak", "host")
    table.columns[-1].justify = "left"
    table.columns[-1].overflow = "ellipsis"
    for row in rows:
        table.add_row(
            str(row.rank),
            format_metric("step_time_ns", row.step_time_ns),
            format_metric("own_work_ns", row.own_work_ns),
            format_metric("exposed_ns", row.exposed_ns),
            format_metric("overlap_ratio", row.overlap_ratio),
            format_metric("last_ratio", row.last_ratio),
            format_metric("lateness_ns", row.lateness_ns),
            format_metric("peak_allocated_bytes", row.peak_allocated_bytes),
            Text(row.host),
        )
    return table


def _skews_title(ranks: Ranks) -> str:
    shown = min(len(ranks.skews), MOST_SKEWS)
    of_all = f", {shown} of {len(ranks.skews)} sorts" if shown < len(ranks.skews) else ""
    return f"Collectives: how far apart ranks arrive, and the transfer alone (medians{of_all})"


def _skews_table(skews: Sequence[CollectiveSkew]) -> Table:
    table = _table("collective", "message", "of", "n", "skew", "p90", "transfer", "bus")
    for row in skews:
        table.add_row(
            format_kind(row.kind),
            format_metric("bytes", row.bytes) if row.bytes >= 0 else MISSING,
            str(row.num_ranks),
            str(row.num_collectives),
            format_metric("skew_ns", row.skew_ns),
            format_metric("skew_ns", row.skew_p90_ns),
            format_metric("pure_transfer_ns", row.pure_transfer_ns),
            format_metric("bus_bytes_per_s", row.bus_bytes_per_s),
        )
    return table
