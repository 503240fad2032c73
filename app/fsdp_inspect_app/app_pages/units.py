"""What does each FSDP unit cost, and which one is waited for?"""

from collections.abc import Sequence

import streamlit as st

from fsdp_inspect.analysis.units import UnitCost
from fsdp_inspect.digest.run import RunDigest
from fsdp_inspect.formatting import MISSING, format_bytes, format_count, format_ns, format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect_app import loading, wording
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    column_formats,
    show_card,
    show_csv_button,
    show_headline,
    show_table,
)
from fsdp_inspect_app.charts.style import CONFIG
from fsdp_inspect_app.charts.units import UNIT_MEASURES, draw_units
from fsdp_inspect_app.frames.units import frame_collectives, frame_units
from fsdp_inspect_app.selection import entry_or_stop, link, linked, page_link
from fsdp_inspect_app.wording import code, plain


def show_page(manifest: RunManifest, digest: RunDigest) -> None:
    """The answer, bars by unit with the sortable table below, and one unit in detail."""
    show_run_header(manifest, digest)
    show_headline(wording.describe_units(digest))
    if not digest.units:
        return
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    with left:
        measure = _pick_measure()
    with right:
        unit = _pick_unit(digest.units)
    if unit is not None:
        _show_unit(unit)
    _show_bars(digest, measure, unit)
    _show_table(digest)


def _pick_measure() -> str:
    chosen = st.segmented_control(
        "Bars show", list(UNIT_MEASURES), default="exposed", required=True, key="measure"
    )
    return str(chosen)


def _pick_unit(units: Sequence[UnitCost]) -> UnitCost | None:
    by_name = {format_unit(unit.fqn): unit for unit in units}
    names = list(by_name)
    asked = linked("unit", names)
    chosen = st.selectbox(
        "Unit in detail",
        names,
        index=None if asked is None else names.index(asked),
        placeholder="all units",
        key="unit",
    )
    link("unit", chosen)
    return None if chosen is None else by_name[chosen]


def _show_bars(digest: RunDigest, measure: str, unit: UnitCost | None) -> None:
    with show_card(UNIT_MEASURES[measure], key="units-bars"):
        st.plotly_chart(
            draw_units(digest.units, measure=measure, highlighted=unit.index if unit else None),
            key="chart-units",
            config=CONFIG,
            alt=f"{UNIT_MEASURES[measure]}: one bar for each of {len(digest.units)} units, "
            "in order of execution; the table below holds the numbers",
        )
        st.caption(plain(_describe_numbers(digest)))


def _describe_numbers(digest: RunDigest) -> str:
    provenance = wording.describe_provenance(
        digest.provenance, "all_gather", "reduce_scatter", "forward", "backward"
    )
    return (
        f"In order of execution. Medians over {digest.num_timed_steps} timed steps of rank "
        f"{digest.median_rank}; forward and backward hold nested units. {provenance}"
    )


def _show_table(digest: RunDigest) -> None:
    frame = frame_units(digest.units)
    with show_card("All numbers, sortable", key="units-table") as header:
        with header:
            show_csv_button(frame, key="units")
        st.dataframe(
            frame,
            hide_index=True,
            column_config={
                **column_formats(frame),
                "unit": st.column_config.TextColumn(pinned=True),
            },
            key="units",
            placeholder=MISSING,
            alt="What each unit costs per step, one row a unit",
        )
        st.caption(plain(f"Bus bandwidth: {find_metric('bus_bytes_per_s').definition}."))


def _show_unit(unit: UnitCost) -> None:
    with st.container(border=True, key="card-unit", gap="xsmall"):
        st.markdown(f"**Unit** {code(format_unit(unit.fqn))}")
        st.markdown(plain(_describe_unit(unit)))
        frame = frame_collectives(unit)
        if len(frame):
            show_table(frame, key="unit-collectives")
        page_link(
            "timeline",
            "Show it in the timeline",
            icon=":material/view_timeline:",
            unit=format_unit(unit.fqn),
        )


def _describe_unit(unit: UnitCost) -> str:
    return (
        f"{format_count(unit.num_parameters)} parameters in {unit.param_dtype}; "
        f"{format_bytes(unit.unsharded_bytes)} when unsharded, {format_bytes(unit.sharded_bytes)} "
        f"on this rank otherwise. reshard_after_forward={unit.reshard_after_forward}. Per step: "
        f"forward {format_ns(unit.forward_ns)}, backward {format_ns(unit.backward_ns)}, waited "
        f"for {format_ns(unit.exposed_ns)}."
    )


entry = entry_or_stop()
show_page(loading.open_entry(entry).manifest, loading.digest_entry(entry))
