"""Page Ranks: the straggler with its cost, ranks by step, one rank, and skews."""

from collections.abc import Sequence
from functools import partial
from math import isnan

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.mesh_dimensions import list_axes
from fsdp_inspect.analysis.mesh_grid import default_axes, measure_mesh_grid
from fsdp_inspect.analysis.rank_grid import measure_rank_grid
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.errors import FsdpInspectError, MissingDataError
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report import ranks_wording
from fsdp_inspect.report.charts.results import draw_breakdown
from fsdp_inspect.report.wording import describe_provenance, format_metric
from fsdp_inspect.result_types import (
    CollectiveSkew,
    DimensionWait,
    MeshGrid,
    RankGrid,
    RankRow,
    Ranks,
    RankVerdict,
    RunEntry,
    RunSource,
    Summary,
)
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.ranks.charts import (
    draw_grid,
    draw_mesh_grid,
    draw_rank_steps,
    frame_grid,
    frame_mesh_grid,
    frame_rank_steps,
    name_middle,
)
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    metric_tiles,
    show_card,
    show_chart_card,
    show_csv_button,
    show_empty_card,
    show_headline,
    show_note,
    show_table,
    show_table_card,
    show_text,
    show_tiles,
    with_terms,
)
from fsdp_inspect_app.drawn_chart import Click
from fsdp_inspect_app.selection import (
    RANK_KEY,
    STEP_KEY,
    entry_or_stop,
    follow,
    link,
    open_column,
    page_link,
    pick,
    switch_page,
)
from fsdp_inspect_app.tables import frame_breakdown, frame_of
from fsdp_inspect_app.wording import plain

_MEASURES = {
    "own work": "own_work_ns",
    "step time": "step_time_ns",
    "exposed": "exposed_ns",
    "peak": "peak_allocated_bytes",
    "lateness": "lateness_ns",
}
_MEASURE_KEY = "measure"
_TABLE_KEY = "ranks-table"
_MOST_REFUSALS = 4
_PICKER_PX = 210
_TILES = ("step_time_ns", "own_work_ns", "exposed_ns", "lateness_ns", "peak_allocated_bytes")


def show_page(entry: RunEntry, run: Run) -> None:
    """Show the headline, the map of ranks and steps, one rank, all ranks, and skews."""
    summary = run.summary()
    show_run_header(run.manifest, summary)
    try:
        ranks = loading.read_ranks(entry)
    except FsdpInspectError as error:
        _show_without_comparison(entry, summary, error)
        return
    answer = st.container()
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    with left:
        measure = _pick_measure()
    with right:
        rank = _pick_rank(run.id, [record.rank for record in run.ranks_recorded])
    row = next((one for one in ranks.ranks if one.rank == rank), None)
    with answer:
        _show_answer(ranks, rank, row)
    grid = loading.result_of(entry, measure_rank_grid, metric=measure)
    step = None
    if rank is not None:
        step = _show_rank(entry, run, grid, rank, row)
    _show_grid(grid, summary, rank, step)
    if rank is None:
        _show_mesh(entry, ranks, measure)
        _show_dimension_waits(ranks)
    _show_all(ranks, run.id, rank)


def _show_without_comparison(entry: RunEntry, summary: Summary, error: FsdpInspectError) -> None:
    """Show why the ranks cannot be compared, and their step times."""
    show_headline("The ranks cannot be compared\\.")
    st.error(plain(str(error)), icon=":material/error:")
    try:
        grid = loading.result_of(entry, measure_rank_grid, metric="step_time_ns")
    except FsdpInspectError:
        return
    _show_grid(grid, summary, None, None)


def _show_answer(ranks: Ranks, rank: int | None, row: RankRow | None) -> None:
    answer, *details = ranks_wording.describe_answer(ranks)
    if row is not None:
        show_headline(plain(ranks_wording.describe_rank(row)))
        show_text(plain(answer))
        return
    if rank is not None:
        show_headline(plain(f"Rank {rank} has no timed step yet."))
        show_text(plain(answer))
        return
    show_headline(plain(answer))
    if details:
        with st.expander("Details"):
            show_text("\n".join(f"- {plain(line)}" for line in details))
    if ranks.straggler is not None:
        straggler = ranks.straggler.rank
        page_link(
            "ranks",
            f"Open rank {straggler}",
            icon=":material/search:",
            rank=straggler,
            step=None,
        )
    _show_refusals(ranks.refusals)


def _show_refusals(refusals: Sequence[str]) -> None:
    if not refusals:
        return
    lines = [f"- {plain(refusal)}" for refusal in refusals[:_MOST_REFUSALS]]
    if len(refusals) > _MOST_REFUSALS:
        lines.append(f"- and {len(refusals) - _MOST_REFUSALS} more")
    st.info("Unknown:\n" + "\n".join(lines), icon=":material/info:")


def _pick_measure() -> str:
    names, key = [*_MEASURES], "rank measure"
    show = partial(st.segmented_control, required=True)
    return _MEASURES[pick("Measure", names, names[0], name=_MEASURE_KEY, key=key, show=show)]


def _pick_rank(run_id: str, known: Sequence[int]) -> int | None:
    key = _picker_of(run_id)
    legal: dict[str, int | None] = {str(rank): rank for rank in known}
    follow(RANK_KEY, key, legal, None)
    chosen = st.selectbox("Rank", known, placeholder="all ranks", key=key, index=None)
    link(RANK_KEY, None if chosen is None else str(chosen))
    return chosen


def _picker_of(run_id: str) -> str:
    """The key of the rank picker."""
    return f"rank of {run_id}"


def _show_grid(grid: RankGrid, summary: Summary, rank: int | None, step: int | None) -> None:
    metric = find_metric(grid.metric)
    if grid.highest is None:
        title = f"{metric.label.capitalize()} by rank and step"
        show_empty_card(title, _why_empty(grid), key="rank-grid")
        return
    highest = grid.highest
    amount = format_metric(grid.metric, highest.value)
    which = "highest timed step" if grid.left_out else "highest step"
    of_all = (
        f"{len(grid.ranks)} ranks"
        if len(grid.ranks) == grid.num_all_ranks
        else f"a sample of {len(grid.ranks)} of {grid.num_all_ranks} ranks"
    )
    note = (
        f"{metric.label.capitalize()}: {metric.definition}. {of_all.capitalize()}, "
        f"{len(grid.steps)} steps. {which.capitalize()}: {amount}, rank {highest.rank}, step "
        f"{highest.step}. Colors span the 1st to the 99th percentile of these steps. Click a cell "
        "to open its rank and step. " + describe_provenance(summary.provenance, "step")
    )
    show_chart_card(
        f"{metric.label.capitalize()} by rank and step",
        draw_grid(grid, rank=rank, step=step),
        partial(frame_grid, grid),
        key="rank-grid",
        alt=f"A map of {metric.label}: {of_all} by {len(grid.steps)} steps. {which.capitalize()}: "
        f"{amount} on rank {highest.rank} in step {highest.step}",
        note=note,
        on_click=partial(_open_cell, grid),
    )
    page_link(
        "ranks",
        f"Open the {which}: rank {highest.rank}, step {highest.step}",
        icon=":material/search:",
        rank=highest.rank,
        step=highest.step,
    )


def _show_mesh(entry: RunEntry, ranks: Ranks, measure: str) -> None:
    """Show the ranks by two dimensions of the mesh, and the group with the highest values."""
    axes = loading.result_of(entry, list_axes)
    first, second = loading.result_of(entry, default_axes)
    if first == second or not ranks.ranks:
        return
    left, right = st.columns(2)
    with left:
        rows = pick("Mesh rows", axes, first, name="mesh_rows", key="mesh rows")
    others = [axis for axis in axes if axis != rows]
    usual = second if second in others else others[0]
    with right:
        columns = pick("Mesh columns", others, usual, name="mesh_columns", key="mesh columns")
    grid = loading.result_of(entry, _measure_mesh, metric=measure, rows=rows, columns=columns)
    label, where = find_metric(measure).label, ranks_wording.describe_location(grid)
    show_chart_card(
        f"{label.capitalize()} by mesh dimension",
        draw_mesh_grid(grid),
        frame_mesh_grid(grid),
        key="mesh-grid",
        alt=f"A map of {label}: {rows} by {columns}. {where}",
        note="Each cell is the median over its ranks, in their typical steps. A stage, group or "
        "node is named only if each of its ranks is above all other ranks. Equal values have "
        "equal colors: the whole scale spans at least 10%.",
        below=plain(where),
    )


def _show_dimension_waits(ranks: Ranks) -> None:
    """Show which ranks are late along each dimension of the mesh."""
    if ranks.dimension_waits:
        show_table_card(
            DimensionWait.TABLE.title,
            frame_of(DimensionWait.TABLE, ranks.dimension_waits),
            key="dimension-waits",
            alt="Late ranks, one row for each dimension",
            note="A late rank makes its group wait along one dimension. Then the whole group is "
            "late along the next one. No rank is named if ranks take turns in arriving last.",
        )


def _measure_mesh(run: RunSource, *, metric: str, rows: str, columns: str) -> MeshGrid:
    return measure_mesh_grid(
        run, measure_ranks(run).ranks, metric=metric, rows=rows, columns=columns
    )


def _open_cell(grid: RankGrid, click: Click) -> None:
    """Open the rank and step of the clicked cell."""
    rank, step = click.row(), click.column()
    if rank in grid.ranks and step in grid.steps:
        switch_page("ranks", rank=rank, step=step)


def _why_empty(grid: RankGrid) -> str:
    if grid.refusals:
        return grid.refusals[0]
    if grid.metric == "peak_allocated_bytes":
        return "Memory was not recorded. On CPU, memory is recorded in memory steps only."
    if grid.metric == "lateness_ns":
        return "Arrival order is unknown: no collective of two ranks matches."
    if grid.steps:
        return "Unknown: no step shows its communication."
    return "No completed step yet."


def _show_rank(
    entry: RunEntry, run: Run, grid: RankGrid, rank: int, row: RankRow | None
) -> int | None:
    """Show one rank: its numbers, links, one of its steps, and all its steps.

    Returns:
        The shown step; None without a completed step.
    """
    verdict = next((one for one in run.summary().rank_verdicts if one.rank == rank), None)
    with show_card(f"Rank {rank}", key="one-rank"):
        if row is not None:
            show_tiles(metric_tiles(_TILES, row), border=False)
        closest = _closest_step(run, rank)
        step = _pick_step(entry, rank, closest)
        _show_links(rank, step)
    if step is not None:
        _show_rank_step(entry, run, rank, step, verdict if step == closest else None)
    _show_rank_steps(grid, rank)
    return step


def _closest_step(run: Run, rank: int) -> int | None:
    return next((one.closest_step for one in run.step_times().ranks if one.rank == rank), None)


def _pick_step(entry: RunEntry, rank: int, closest: int | None) -> int | None:
    """The chosen completed step of the rank; default the step closest to the typical step."""
    times = loading.result_of(entry, measure_rank_grid, metric="step_time_ns")
    own = times.of_rank(rank)
    steps = (
        []
        if own is None
        else [step for step, time in zip(times.steps, own.tolist(), strict=True) if not isnan(time)]
    )
    if not steps:
        return None
    first = steps[-1] if closest is None else closest
    return pick(
        "Step",
        steps,
        first,
        name=STEP_KEY,
        key=f"step of rank {rank} of {entry.id}",
        is_default_hidden=first == closest,
        format_func=lambda step: f"{step} (typical)" if step == closest else str(step),
        width=_PICKER_PX,
    )


def _show_links(rank: int, step: int | None) -> None:
    with st.container(horizontal=True):
        page_link(
            "timeline",
            "Show in timeline" if step is None else f"Show step {step} in timeline",
            rank=rank,
            step=step,
        )
        page_link("memory", "Show memory", rank=rank, step=None)
        page_link("ranks", "All ranks", rank=None, step=None)


def _show_rank_steps(grid: RankGrid, rank: int) -> None:
    metric = find_metric(grid.metric)
    if grid.of_rank(rank) is None:
        reason = f"Unknown for rank {rank}: {_why_empty(grid)}"
        show_empty_card(f"{metric.label.capitalize()} over steps", reason, key="rank-steps")
        return
    show_chart_card(
        f"{metric.label.capitalize()} over steps",
        draw_rank_steps(grid, rank),
        frame_rank_steps(grid, rank),
        key="rank-steps",
        alt=f"{metric.label} of rank {rank} over {len(grid.steps)} steps, and the "
        f"{name_middle(grid)}",
        note=f"{metric.label.capitalize()}: {metric.definition}. Click a step to open it.",
        on_click=open_column("ranks", STEP_KEY, grid.steps, rank=rank),
    )


def _show_rank_step(
    entry: RunEntry, run: Run, rank: int, step: int, verdict: RankVerdict | None
) -> None:
    """Show the breakdown of one step of the rank, and the verdict for its typical step."""
    try:
        breakdown = loading.result_of(entry, measure_step_breakdown, rank=rank, step=step)
    except MissingDataError as error:
        st.info(plain(str(error)))
        return
    which = f"Step {step}, closest to the typical step" if verdict else f"Step {step}"
    show_chart_card(
        f"{which}: {format_ns(breakdown.step_time_ns)}",
        draw_breakdown(breakdown),
        frame_breakdown(breakdown),
        key="rank-breakdown",
        alt=f"One bar of {format_ns(breakdown.step_time_ns)}: the parts of step {step} of rank "
        f"{rank}",
        note=f"{verdict.sentence if verdict else ''} The parts add up. Hatching marks exposed "
        "waits. " + describe_provenance(run.summary().provenance, "step", "forward", "backward"),
    )


def _show_all(ranks: Ranks, run_id: str, shown: int | None) -> None:
    """Show all ranks; choosing a row opens its rank."""
    if not ranks.ranks:
        return
    frame = frame_of(Ranks.TABLE, ranks.ranks, first=ranks_wording.RANK_COLUMNS)
    numbers = [row.rank for row in ranks.ranks]
    chosen = [numbers.index(shown)] if shown in numbers else []
    with show_card(f"Ranks: {len(ranks.ranks)}", key="all-ranks") as header:
        with header:
            show_csv_button(frame, key="ranks")
        show_table(
            frame,
            key=_TABLE_KEY,
            alt="The ranks, one row each",
            columns={"rank": st.column_config.NumberColumn(pinned=True)},
            # A callback reports a choice once; the row stays chosen in later runs of the page.
            on_select=partial(_open_row, numbers, run_id),
            selection_mode="single-row",
            selection_default={"selection": {"rows": chosen}},
        )
        show_note(
            plain(
                with_terms(
                    f"{ranks_wording.describe_comparing(ranks)} Choose a row to open the rank. "
                    "The menu of the table shows more columns.",
                    *frame,
                    "lateness",
                )
            )
        )
    if ranks.skews:
        _show_skews(ranks)


def _open_row(numbers: Sequence[int], run_id: str) -> None:
    """Pick the rank of the chosen row, or no rank if the row is no longer chosen."""
    rows = st.session_state[_TABLE_KEY]["selection"]["rows"]
    is_known = bool(rows) and rows[0] < len(numbers)
    st.session_state[_picker_of(run_id)] = numbers[rows[0]] if is_known else None
    link(STEP_KEY, None)


def _show_skews(ranks: Ranks) -> None:
    show_table_card(
        "Skew and transfer by collective",
        frame_of(CollectiveSkew.TABLE, ranks.skews),
        key="skews",
        alt="Skew and transfer, one row for each kind of collective",
        note=f"Skew: {find_metric('skew_ns').definition}; median and p90. Transfer: mean.",
    )


entry = entry_or_stop()
show_page(entry, loading.open_entry(entry))
