"""Page Units: the cost of each FSDP unit, and one unit in detail."""

from collections.abc import Sequence
from functools import partial

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.errors import ImportingError, MissingDataError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.charts.results import UNIT_MEASURES, draw_kernels, draw_units
from fsdp_inspect.report.wording import describe_provenance
from fsdp_inspect.result_types import RunEntry, Summary, UnitCost, UnitCosts
from fsdp_inspect.trace.sharders import UNUSED_MAP
from fsdp_inspect_app import loading, wording
from fsdp_inspect_app.app_pages.units.unit_page import show_unit
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    show_card,
    show_chart_card,
    show_csv_button,
    show_explore_button,
    show_headline,
    show_table,
    show_table_card,
)
from fsdp_inspect_app.drawn_chart import show_chart
from fsdp_inspect_app.selection import UNIT_KEY, entry_or_stop, follow, link, open_unit, pick
from fsdp_inspect_app.tables import frame_of

_MEASURE_KEY = "bars"
_MOST_BARS = 28
_BARS_HEIGHT = 720
_UNIT_COLUMN = "unit"
_FIRST_COLUMNS = (
    *("unit", "exposed_ns", "forward_ns", "backward_ns"),
    *(f"{kind}_exposed_ns" for kind in ("all_gather", "reduce_scatter", "all_reduce")),
    "num_parameters",
)


def show_page(entry: RunEntry, run: Run) -> None:
    """Show one unit in detail, or all of them: the headline, bars, and the sortable table."""
    summary = run.summary()
    show_run_header(run.manifest, summary)
    answer = st.container()
    if not summary.units:
        with answer:
            show_headline(wording.describe_largest_waits(summary))
        return
    unit = _pick_unit(summary.units)
    if unit is not None:
        show_unit(run, unit, answer)
        _show_kernels(run, unit)
        return
    owners = summary.exposed.owners if summary.exposed is not None else ()
    with answer:
        show_headline(wording.describe_largest_waits(summary, owners))
    _show_bars(run, summary)
    _show_table(summary)
    _show_kernels(run)


def _pick_unit(units: Sequence[UnitCost]) -> UnitCost | None:
    by_name = {format_unit(unit.fqn): unit for unit in units}
    names = {name: name for name in by_name}
    follow(UNIT_KEY, UNIT_KEY, names, None)
    chosen = st.selectbox("Unit", list(by_name), index=None, placeholder="all units", key=UNIT_KEY)
    link(UNIT_KEY, chosen)
    return None if chosen is None else by_name[chosen]


def _show_bars(run: Run, summary: Summary) -> None:
    show = partial(st.segmented_control, required=True)
    measures = [name for name in UNIT_MEASURES if name != "compute" or _have_passes(summary)]
    measure = pick("Measure", measures, "exposed", name=_MEASURE_KEY, show=show)
    note = f"{_describe_numbers(summary)} Click a bar to open its unit."
    if run.manifest.observed.get("find_unused_parameters") == "True":
        note += f" DDP searches for unused parameters (R36 of Advice). {UNUSED_MAP}"
    chart = draw_units(summary.units, measure=measure)
    title = f"{UNIT_MEASURES[measure]}, rank {summary.median_rank}"
    with show_card(title, key="units-bars", note=note) as header:
        with header:
            show_explore_button(chart, key="units", title=title)
        # Many bars scroll inside their card, so that the table stays near.
        scrolls = len(summary.units) > _MOST_BARS
        with st.container(
            height=_BARS_HEIGHT if scrolls else "content", border=False, key="units-scroll"
        ):
            fqns = [unit.fqn for unit in summary.units]
            show_chart(
                chart,
                key="units",
                alt=f"{title}: one bar for each of {len(summary.units)} units, "
                "in order of execution; the table below has the numbers",
                on_click=lambda click: open_unit(click.pick(fqns)),
            )


def _describe_numbers(summary: Summary) -> str:
    provenance = describe_provenance(
        summary.provenance, "all_gather", "reduce_scatter", "forward", "backward"
    )
    nested = "Forward and backward include nested units and the waits for them. "
    return (
        f"In order of execution. Typical step of rank {summary.median_rank}. "
        f"{nested if _have_passes(summary) else ''}{provenance}"
    )


def _have_passes(summary: Summary) -> bool:
    """Whether the times of passes of units are known: buckets and imports have none."""
    return any(unit.forward_ns is not None for unit in summary.units)


def _show_table(summary: Summary) -> None:
    frame = frame_of(UnitCosts.TABLE, summary.units, first=_FIRST_COLUMNS)
    note = (
        "Click a unit to open it. The menu of the table shows more columns. "
        f"Bus bandwidth: {find_metric('bus_bytes_per_s').definition}."
    )
    with show_card("All units", key="units-table", note=note) as header:
        with header:
            show_csv_button(frame, key="units")
        pinned = st.column_config.TextColumn(pinned=True, help="Click to open")
        state = show_table(
            frame,
            key="units",
            alt="Units, one row each",
            columns={_UNIT_COLUMN: pinned},
            on_select="rerun",
            selection_mode="single-cell",
        )
    for row, column in state["selection"]["cells"]:
        if column == _UNIT_COLUMN and row < len(summary.units):
            open_unit(summary.units[row].fqn)


def _show_kernels(run: Run, unit: UnitCost | None = None) -> None:
    """Show the kernels of profiled steps, or those of one unit; nothing without them."""
    try:
        kernels = run.kernels()
    except MissingDataError:
        return
    except ImportingError as error:
        st.warning(wording.plain(str(error)), icon=":material/warning:")
        return
    what = "Kernels" if kernels.on_device else "Operators"
    steps = f"{len(kernels.steps)} profiled steps of rank {kernels.rank}"
    note = (
        f"Mean of {steps}, under the profiler. Of {what.lower()} that run at once, the first one "
        "counts; communication also counts while compute runs. (no unit): code outside of units."
    )
    if unit is not None:
        own = [cost for cost in kernels.groups if cost.fqn == unit.fqn]
        frame, alt = frame_of(type(kernels).TABLE, own), f"{what} of the unit"
        show_table_card(alt, frame, key="unit-kernels", alt=alt, note=note)
        return
    title = f"{what} by unit, phase and kind"
    show_chart_card(
        title,
        draw_kernels(kernels),
        frame_of(type(kernels).TABLE, kernels.groups),
        key="kernels",
        alt=f"{title}: units above, phases below them, then kinds; the table has the numbers",
        note=note,
    )
    frame, alt = frame_of(type(kernels).KINDS, kernels.kinds), f"{what} by kind"
    show_table_card(alt, frame, key="kernel-kinds", alt=alt, note=note)


entry = entry_or_stop()
show_page(entry, loading.open_entry(entry))
