"""Describe the comparison of a run's ranks in sentences that all reports share.

The text is plain: each report escapes it for its format.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isnan

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.analysis.mesh_grid import MeshGrid
from fsdp_inspect.analysis.stragglers.dimension_waits import DimensionWait
from fsdp_inspect.analysis.stragglers.evidence import LEAST_BUSIEST_RATIO, LEAST_COST_RATIO
from fsdp_inspect.analysis.stragglers.expert_load import ExpertGroup, ExpertLoad, LoadFinding
from fsdp_inspect.analysis.stragglers.rank_replay import StepReplay
from fsdp_inspect.analysis.stragglers.rank_work import MAX_CHANCE
from fsdp_inspect.analysis.stragglers.ranks import CollectiveSkew, RankRow, Ranks
from fsdp_inspect.analysis.verdict import RareWork, SlowGroup, Straggler
from fsdp_inspect.analysis.verdict.words import (
    describe_extra_work,
    describe_slow_group,
    describe_waits_along,
)
from fsdp_inspect.columns import TableSpec
from fsdp_inspect.formatting import MISSING, capitalize, format_ns, format_ranks, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import dim, indented, new_table, render_table, section
from fsdp_inspect.report.wording import format_metric

_NO_STRAGGLER = "No rank is a straggler."
_DEFINITION = (
    f"A straggler has the most own work in at least {format_ratio(LEAST_BUSIEST_RATIO)} of the "
    f"steps, delays the other ranks, and costs at least {format_ratio(LEAST_COST_RATIO)} of a step."
)


def describe_answer(ranks: Ranks) -> tuple[str, ...]:
    """Describe the straggler or slow group and its cost, or that there is none; headline first."""
    if ranks.slow_group is not None:
        lines = [_slow_group(ranks.slow_group), *describe_slow_group(ranks.slow_group)]
    elif ranks.straggler is not None and ranks.replay is not None:
        lines = [
            _straggler(ranks.straggler),
            _meanwhile(ranks.straggler, len(ranks.ranks)),
            *filter(None, [describe_waits_along(ranks.straggler.waits_ns)]),
            _replay(ranks.replay, ranks.straggler),
        ]
    else:
        lines = [_no_straggler(ranks)]
        if ranks.replay is not None and lines[0] == _NO_STRAGGLER:
            lines.append(_DEFINITION)
        if ranks.rare_work is not None:
            lines.append(_rare_work(ranks.rare_work))
        if ranks.replay is not None:
            lines.append(_imbalance(ranks, ranks.replay))
    slow = ranks.slow_group or ranks.straggler
    if ranks.trust.are_cores_first(slow.cost_ratio if slow else 0.0):
        lines.insert(0, ranks.trust.cores_headline)
    lines.extend(filter(None, [ranks.trust.time_caveat]))
    lines.extend(_late_along(row) for row in ranks.dimension_waits if _is_located(ranks, row))
    if ranks.expert_load is not None:
        lines.append(describe_expert_load(ranks.expert_load))
    if ranks.skewed_ratio is not None:
        lines.append(
            "The skew is longer than the transfer at "
            f"{format_metric('skewed_ratio', ranks.skewed_ratio)} of the collectives."
        )
    return tuple(lines)


def _is_located(ranks: Ranks, row: DimensionWait) -> bool:
    """Whether the late ranks of a dimension are known, and the waits matter."""
    step_time = max((one.step_time_ns for one in ranks.ranks), default=0)
    return bool(row.late_ranks) and row.late_wait_ns >= LEAST_COST_RATIO * step_time


def _late_along(row: DimensionWait) -> str:
    """Describe the late ranks of one dimension of the mesh."""
    place = f" ({row.late_place})" if row.late_place else ""
    verb = "causes" if len(row.late_ranks) == 1 else "cause"
    return (
        f"{capitalize(format_ranks(row.late_ranks))}{place} {verb} "
        f"{format_ratio(row.caused_ratio)} of the waits along {row.dimension}. Rank "
        f"{row.waiting_rank} waits longest there: {format_ns(row.late_wait_ns)} a step."
    )


def describe_expert_load(load: ExpertLoad) -> str:
    """Describe whether unequal load of the experts explains waits, as far as messages show it."""
    worst = load.worst
    waits = f"Ranks that share experts wait up to {format_ns(worst.extra_wait_ns)} longer per step"
    match worst.finding:
        case LoadFinding.CAUSE:
            return (
                f"{waits} than each other. Likely cause: load imbalance of the experts, because "
                f"{_busiest(worst)} and waits least. Balance the tokens per expert."
            )
        case LoadFinding.OWN_TOKENS:
            return (
                f"{waits} than each other. Likely cause: unequal batches, because rank "
                f"{worst.busiest_rank} sends {worst.imbalance_ratio:.2f} times the mean bytes of "
                "its own tokens to the experts and waits least. Give each rank equally many tokens."
            )
        case LoadFinding.OPPOSITE:
            return (
                f"{waits} than each other. The load of the experts does not explain it: "
                f"{_busiest(worst)}, but does not wait least."
            )
        case LoadFinding.NO_SIZES:
            return (
                f"{waits} than each other. The cause is unknown: the sizes of their all-to-alls "
                "are unknown."
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


def _busiest(group: ExpertGroup) -> str:
    """Describe the rank with the largest load of a group of experts."""
    rank, ratio = group.busiest_rank, f"{group.imbalance_ratio:.2f} times the mean bytes"
    if group.are_directions_known:
        return f"the experts of rank {rank} send {ratio} of results back"
    return f"rank {rank} sends {ratio} in its all-to-alls"


def describe_location(grid: MeshGrid) -> str:
    """Describe which ranks of the mesh have the highest values, if any."""
    label = find_metric(grid.metric).label
    found = grid.located
    if all(isnan(value) for line in grid.values for value in line):
        return f"{label.capitalize()} is unknown for all ranks."
    if found is None:
        return f"No node, group or stage is above all others in {label}."
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
            "collectives. Its median delay after the first rank, over all of them, is "
            f"{format_metric('lateness_ns', row.lateness_ns)}."
        )
    step = f"Rank {row.rank}{where}: {format_metric('step_time_ns', row.step_time_ns)} a step"
    if row.exposed_ns is None:
        return f"{step}. Its exposed communication and own work are unknown.{arrives}"
    return (
        f"{step}, of which {format_metric('exposed_ns', row.exposed_ns)} exposed and "
        f"{format_metric('own_work_ns', row.own_work_ns)} own work.{arrives}"
    )


def _straggler(straggler: Straggler) -> str:
    where = f" ({straggler.host})" if straggler.host else ""
    return (
        f"Rank {straggler.rank}{where} is a straggler and costs "
        f"{format_metric('cost_ns', straggler.cost_ns)} a step."
    )


def _slow_group(group: SlowGroup) -> str:
    """State the ranks of a slow group and their cost."""
    return (
        f"{capitalize(format_ranks(group.ranks))} ({group.names[0]}) are a slow group and cost "
        f"{group.at_most}{format_metric('cost_ns', group.cost_ns)} a step."
    )


def _meanwhile(straggler: Straggler, num_ranks: int) -> str:
    middle, others = "the median of the other ranks", "other ranks"
    if num_ranks == 2:
        middle = others = "the other rank"
    mostly = f", mostly in {straggler.named_phase}" if straggler.named_phase else ""
    extra = describe_extra_work(straggler)
    return (
        f"It arrives last at {format_metric('last_ratio', straggler.last_ratio)} of the "
        f"collectives, {format_metric('late_ns', straggler.late_ns)} after {middle}{mostly}. "
        + (f"Its {extra} per step than on {others}. " if extra else "")
        + f"The cost is {format_metric('cost_ratio', straggler.cost_ratio)} of the step."
    )


def _replay(replay: StepReplay, straggler: Straggler) -> str:
    ends = straggler.cost_range
    between = f" The cost of a window is {ends}." if ends else ""
    return (
        f"Predicted: if rank {straggler.rank} worked as long as rank {straggler.like_rank}, "
        f"{_steps(replay)} would take "
        f"{format_metric('step_time_ns', replay.replayed_ns - straggler.cost_ns)} a step instead "
        f"of {format_metric('step_time_ns', replay.replayed_ns)}.{between} "
        f"{_replay_error(replay)}"
    )


def _replay_error(replay: StepReplay) -> str:
    """State the error of the replay on the recorded steps."""
    return (
        "The replay differs from the recorded steps by "
        f"{format_metric('error_ratio', replay.error_ratio)}. The error of the replay with changed "
        "work is unknown."
    )


def _no_straggler(ranks: Ranks) -> str:
    if not ranks.ranks:
        return "Ranks cannot be compared: the run has no timed step."
    if len(ranks.ranks) == 1 < ranks.num_recorded:
        rank = ranks.ranks[0].rank
        return f"Ranks cannot be compared: only rank {rank} has a complete timed step."
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


def _rare_work(rare: RareWork) -> str:
    by_chance = (
        f" Among {rare.num_ranks} equal ranks, one rank has all of these steps by chance in "
        f"{format_ratio(rare.chance)} of runs."
    )
    return f"{rare.sentence}{by_chance if rare.chance > MAX_CHANCE else ''}"


def _imbalance(ranks: Ranks, replay: StepReplay) -> str:
    cost = format_metric("imbalance_ns", ranks.imbalance_ns)
    where, rare, others = _steps(replay), ranks.rare_work, ""
    whose = " of the recorded ranks" if ranks.trust.missing_ranks else ""
    costs = f"Unequal work{whose} costs {cost} a step in {where}"
    if rare is not None:
        inside = len({*rare.steps} & {*replay.steps}) or "None"
        others = f" {inside} of these {len(replay.steps)} steps are among those {len(rare.steps)}."
    elif ranks.straggler_refusal is None:
        changes = max(row.busiest_ratio for row in ranks.ranks) < LEAST_BUSIEST_RATIO
        alone = f"no rank alone is known to cost {format_ratio(LEAST_COST_RATIO)} or more"
        why = "the rank with the longest work changes" if changes else alone
        costs += f", although no rank is a straggler: {why}"
    return (
        f"{costs}.{others} This compares with a replay of them in which all ranks have equal work, "
        f"and includes random differences between the ranks. {_replay_error(replay)}"
    )


def _steps(replay: StepReplay) -> str:
    steps = replay.steps
    if replay.num_windows > 1:
        length = len(steps) // replay.num_windows
        where = f"between steps {steps[0]} and {steps[-1]}"
        return f"{replay.num_windows} windows of {length} steps {where}"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def describe_comparing(ranks: Ranks) -> str:
    """Describe how the ranks were compared, one sentence a line."""
    lines = ["Times are measured. They are those of the typical step of each rank."]
    if ranks.sampled_ranks and ranks.sampled_steps:
        lines.append(
            f"Collectives: {len(ranks.sampled_ranks)} of {len(ranks.ranks)} ranks in "
            f"{len(ranks.sampled_steps)} sampled steps, matched by process group and number. "
            "Evaluation does not count. Transfer: mean shortest duration over the ranks."
        )
    if any(row.transfer_ns is None for row in ranks.skews):
        lines.append("A transfer is unknown if most ends are only upper bounds.")
    if ranks.clock_uncertainty_ns is not None:
        error = ranks.clock_uncertainty_ns
        lines.append(
            "The ranks share one clock."
            if error == 0
            else f"Clocks are aligned to within {format_ns(error)}."
        )
    return "\n".join(lines)


# --- Render the ranks of a run for a terminal: the straggler and its cost, then the tables.
#
# Names from the run are plain text, never rich markup.

MOST_RANKS = 16
MOST_SKEWS = 8
RANK_COLUMNS = (
    "rank",
    "step_time_ns",
    "own_work_ns",
    "exposed_ns",
    "lateness_ns",
    "last_ratio",
    "overlap_ratio",
    "peak_allocated_bytes",
    "host",
)
"""The columns of `Ranks.TABLE` that fit 80 characters, and a page at its usual width."""


def render_ranks(
    ranks: Ranks, *, rank: int | None = None, grid: MeshGrid | None = None
) -> RenderableType:
    """Render the straggler and its cost, the ranks, and the skew of the collectives.

    Args:
        ranks: The comparison of the ranks.
        rank: Show this rank only; default all, or those with the most and the least work.
        grid: The ranks laid out by two dimensions of the mesh; default not shown.
    """
    shown = _choose(ranks.ranks, rank)
    answer, *details = describe_answer(ranks)
    parts: list[RenderableType] = [Text(answer, style="bold"), *map(indented, details)]
    parts.extend(Text(f"note: {refusal}", style="yellow") for refusal in _shorten(ranks.refusals))
    if shown:
        table = render_table(Ranks.TABLE, shown, *RANK_COLUMNS)
        parts += section(_ranks_title(ranks.ranks, shown), table)
    if any(len(row.dimensions) > 1 for row in shown):
        parts.extend(["", *_dimensions(shown)])
    if ranks.dimension_waits and rank is None:
        parts += section(Ranks.WAITS.title, render_table(Ranks.WAITS, ranks.dimension_waits))
    if grid is not None:
        parts.extend(["", *_grid(grid)])
    if ranks.skews and rank is None:
        parts += section(_skews_title(ranks), _skews_table(ranks.skews[:MOST_SKEWS]))
    parts += ["", dim(describe_comparing(ranks))]
    return Group(*parts)


# --- in words


def _shorten(refusals: Sequence[str]) -> Iterable[str]:
    yield from refusals[:MOST_SKEWS]
    if len(refusals) > MOST_SKEWS:
        yield f"{len(refusals) - MOST_SKEWS} more notes in --json."


# --- in tables


def _grid(grid: MeshGrid) -> Iterable[RenderableType]:
    label = find_metric(grid.metric).label
    yield Text(f"Median {label} by {grid.rows} and {grid.columns}", style="bold")
    table = new_table(f"<{grid.rows}", *(f"{grid.columns} {each}" for each in grid.column_places))
    for place, values in zip(grid.row_places, grid.values, strict=True):
        cells = [MISSING if isnan(one) else format_metric(grid.metric, one) for one in values]
        table.add_row(place, *cells)
    yield table
    yield Text(describe_location(grid))


def _dimensions(rows: Sequence[RankRow]) -> Iterable[RenderableType]:
    """The exposed times by dimension. The title names the dimensions, so that cells are short."""
    spec = Ranks.DIMENSIONS.with_values(rows)
    axes = ", ".join(rows[0].coordinates)
    yield Text(f"{spec.title}{f' (position: {axes})' if axes else ''}", style="bold")
    columns = (
        replace(
            column,
            label="position",
            value=lambda row: ", ".join(map(str, row.coordinates.values())),
        )
        if column.name == "place"
        else replace(column, label=column.label.removeprefix("exposed "))
        for column in spec.columns
    )
    yield render_table(TableSpec(spec.title, tuple(columns)), rows)


def _choose(rows: Sequence[RankRow], rank: int | None) -> list[RankRow]:
    """The given rank; or all ranks; or, of many, the ranks with the most and the least work."""
    if rank is not None:
        return [row for row in rows if row.rank == rank]
    if len(rows) <= MOST_RANKS:
        return list(rows)
    ordered = sorted(rows, key=lambda row: -(row.own_work_ns or 0))
    return [*ordered[: MOST_RANKS // 2], *ordered[-MOST_RANKS // 2 :]]


def _ranks_title(rows: Sequence[RankRow], shown: Sequence[RankRow]) -> str:
    if len(shown) == len(rows):
        return "Typical step of each rank"
    if len(shown) == 1:
        return f"Typical step of rank {shown[0].rank}"
    half = len(shown) // 2
    return f"The {half} ranks with the most work and the {half} with the least, of {len(rows)}"


def _skews_table(skews: Sequence[CollectiveSkew]) -> RenderableType:
    """The skews; with several mesh dimensions, these take the place of details."""
    names = [column.name for column in Ranks.SKEWS.columns]
    is_split = len({row.dimension for row in skews}) > 1
    left_out = ("skew_p90_ns", "bus_bytes_per_s") if is_split else ("dimension",)
    return render_table(Ranks.SKEWS, skews, *(name for name in names if name not in left_out))


def _skews_title(ranks: Ranks) -> str:
    shown = min(len(ranks.skews), MOST_SKEWS)
    of_all = f", the first {shown} of {len(ranks.skews)}" if shown < len(ranks.skews) else ""
    return f"Skew (median, p90) and transfer (mean) of the collectives{of_all}"
