"""How do the ranks of a run read in a terminal? Who is late and what it costs, then the tables.

Nothing is computed here. Names from the run are put in as plain text, never as rich markup.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.stragglers.ranks import CollectiveSkew, RankRow, Ranks
from fsdp_inspect.formatting import MISSING
from fsdp_inspect.report.ranks_wording import describe_answer, describe_comparing
from fsdp_inspect.report.values import format_kind, format_metric

MOST_RANKS = 16
MOST_SKEWS = 8


def render_ranks(ranks: Ranks, *, rank: int | None = None) -> RenderableType:
    """The straggler and its price, the skew of the collectives, every rank.

    Args:
        ranks: What was measured.
        rank: Show this one only; default the most telling ones.
    """
    shown = _choose(ranks.ranks, rank)
    answer, *details = describe_answer(ranks)
    parts: list[RenderableType] = [Text(answer, style="bold"), *map(_indented, details)]
    parts.extend(Text(f"note: {refusal}", style="yellow") for refusal in _shorten(ranks.refusals))
    if shown:
        parts.extend(
            ["", Text(_ranks_title(ranks.ranks, shown), style="bold"), _ranks_table(shown)]
        )
    if ranks.skews and rank is None:
        parts.extend(["", Text(_skews_title(ranks), style="bold")])
        parts.append(_skews_table(ranks.skews[:MOST_SKEWS]))
    parts.extend(["", Text(describe_comparing(ranks), style="dim")])
    return Group(*parts)


# --- in words


def _shorten(refusals: Sequence[str]) -> Iterable[str]:
    yield from refusals[:MOST_SKEWS]
    if len(refusals) > MOST_SKEWS:
        yield f"and {len(refusals) - MOST_SKEWS} further ones; --json lists them."


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


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
        return "Ranks (typical step of each)"
    if len(shown) == 1:
        return f"Rank {shown[0].rank} (typical step)"
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
