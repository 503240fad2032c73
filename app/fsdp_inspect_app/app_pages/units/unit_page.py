"""Show one unit: exposed waits, collectives, prefetch, memory and parameters."""

from collections.abc import Mapping, Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from fsdp_inspect import Run
from fsdp_inspect.analysis.prefetch import GATHERS
from fsdp_inspect.analysis.units import UnitKindCost
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import (
    format_bytes,
    format_bytes_per_s,
    format_category,
    format_cause,
    format_count,
    format_ns,
    format_unit,
)
from fsdp_inspect.report.wording import describe_main_cause, describe_provenance, format_kind
from fsdp_inspect.result_types import (
    Bandwidth,
    Cause,
    Exposed,
    LinkFit,
    PeakMoment,
    RankWaits,
    Summary,
    Unit,
    UnitCost,
    UnitCosts,
    UnitHistory,
)
from fsdp_inspect_app.app_pages.units.charts import (
    draw_collectives,
    draw_holds,
    draw_spreads,
    frame_history,
    frame_holds,
    frame_parameters,
    frame_spreads,
    name_history,
)
from fsdp_inspect_app.cards import (
    show_card,
    show_chart_card,
    show_csv_button,
    show_empty_card,
    show_headline,
    show_note,
    show_table,
    show_table_card,
    show_text,
)
from fsdp_inspect_app.selection import RANK_KEY, STEP_KEY, UNIT_KEY, Value, page_link
from fsdp_inspect_app.tables import frame_of
from fsdp_inspect_app.wording import code, plain

_PREFETCH_COLUMNS = (
    *("phase", "num_gathers", "issue", "issued_by"),
    *("lead_ns", "duration_ns", "hidden_ratio", "exposed_ns"),
)


def show_unit(
    run: Run,
    unit: UnitCost,
    answer: DeltaGenerator,
) -> None:
    """Show everything about one unit.

    Args:
        run: The run.
        unit: The unit.
        answer: The container of the page's headline.
    """
    summary = run.summary()
    name = format_unit(unit.fqn)
    record = next(one for one in run.manifest.units if one.index == unit.index)
    _show_neighbours(summary.units, unit)
    waits: RankWaits | None = None
    history: UnitHistory | None = None
    try:
        waits = run.exposed(unit=name)
        history = run.unit_history(name)
    except StoreError as error:
        st.warning(plain(str(error)), icon=":material/warning:")
    with answer:
        show_headline(_describe_waits(unit, waits, summary))
    show_text(plain(f"{_describe_unit(unit)} {_describe_owned(unit, summary.memory.peak)}"))
    _show_waits(unit, waits, summary)
    if history is not None and history.histories:
        _show_collectives(history, _fits_of(history, waits.bandwidth if waits else None), summary)
    elif unit.all_gather.count_per_step:
        _show_holds(history)
    if unit.all_gather.count_per_step:
        _show_prefetch(waits)
    _show_parameters(record)


def _show_neighbours(units: Sequence[UnitCost], unit: UnitCost) -> None:
    """Show links to the previous unit, the next unit and all units, in order of execution."""
    position = [one.index for one in units].index(unit.index)
    with st.container(horizontal=True, vertical_alignment="center", key="neighbours"):
        page_link("units", "All units", icon=":material/list:", **{UNIT_KEY: None})
        for words, icon, place in (
            ("Previous", ":material/arrow_back:", position - 1),
            ("Next", ":material/arrow_forward:", position + 1),
        ):
            if 0 <= place < len(units):
                name = format_unit(units[place].fqn)
                page_link("units", f"{words}: {code(name)}", icon=icon, **{UNIT_KEY: name})
        st.caption(f"{position + 1} of {len(units)} in order of execution", width="content")


def _describe_waits(unit: UnitCost, waits: RankWaits | None, summary: Summary) -> str:
    """The headline: the exposed wait of the unit and its main cause."""
    name = code(format_unit(unit.fqn))
    if waits is None:
        return f"The waits of {name} cannot be read\\."
    if waits.exposed is None or summary.step_time_ns is None:
        return f"{name}: no timed step yet\\."
    if unit.exposed_ns is None:
        return f"{name}: its exposed wait is unknown, because the import shows no collective\\."
    if unit.exposed_ns == 0:
        return f"{name}: no exposed wait\\."
    mostly = describe_main_cause(waits.exposed.owners, is_headline=True)
    why = f", {mostly}" if mostly else ""
    return f"{name}: " + plain(f"{format_ns(unit.exposed_ns)} exposed per step{why}.")


def _describe_unit(unit: UnitCost) -> str:
    size = f"{format_bytes(unit.unsharded_bytes)} unsharded, "
    size += f"{format_bytes(unit.sharded_bytes)} sharded on this rank"
    if unit.sharded_bytes == unit.unsharded_bytes:
        size = f"{format_bytes(unit.unsharded_bytes)} on each rank"
    facts = [
        f"{unit.module_class or 'Unit'}: {format_count(unit.num_parameters)} parameters in "
        f"{unit.param_dtype}, {size}."
    ]
    if unit.all_gather.count_per_step:
        facts.append(f"reshard_after_forward={unit.reshard_after_forward}.")
    if unit.forward_ns is not None:
        recompute = f" with recompute {format_ns(unit.recompute_ns)}" if unit.recompute_ns else ""
        facts.append(
            f"Per step: forward {format_ns(unit.forward_ns)}, backward "
            f"{format_ns(unit.backward_ns)}{recompute}."
        )
    return " ".join(facts)


def _describe_owned(unit: UnitCost, peak: PeakMoment | None) -> str:
    """The memory that the unit owns at the peak."""
    if peak is None:
        return "Memory at the peak by unit requires a memory step: Recorder(..., memory_steps=[3])."
    owned = [row for owner in peak.owners if owner.unit == unit.index for row in owner.categories]
    amounts = [f"{format_category(row.category)} {format_bytes(row.bytes)}" for row in owned]
    return (
        f"Memory at the peak (step {peak.step}, rank {peak.rank}, counted by the storage tracker): "
        f"{', '.join(amounts) or 'none of this unit'}."
    )


def _show_waits(unit: UnitCost, waits: RankWaits | None, summary: Summary) -> None:
    exposed = waits.exposed if waits is not None else None
    if exposed is None or not exposed.owners:
        show_empty_card(
            "Exposed waits by cause",
            "This unit has no collective in a timed step.",
            key="unit-waits",
        )
        return
    causes = [
        f"cause_{cause.label}_ns"
        for cause in Cause
        if any(cause.label in owner.causes_ns for owner in exposed.owners)
    ]
    names = ("collective", "phase", "exposed_ns", *causes, "step_ratio")
    frame = frame_of(RankWaits.TABLE, exposed.owners, *names)
    with show_card("Exposed waits by cause", key="unit-waits") as header:
        with header:
            show_csv_button(frame, key="unit-waits")
        show_table(frame, key="unit-causes", alt="Exposed waits of the unit by cause")
        show_table(
            frame_of(
                UnitCosts.COLLECTIVES,
                _collectives_of(unit),
                *(column.name for column in UnitCosts.COLLECTIVES.columns[1:]),
            ),
            key="unit-collectives",
            alt="Collectives of the unit, one row for each kind",
        )
        _show_longest_wait(exposed, unit)
        arrivals = waits.arrivals.sentence if waits is not None and waits.arrivals else ""
        provenance = describe_provenance(
            summary.provenance, "all_gather", "reduce_scatter", "all_reduce"
        )
        show_note(plain(f"Typical step of rank {exposed.rank}. {provenance} {arrivals}"))


def _collectives_of(unit: UnitCost) -> list[UnitKindCost]:
    kinds = {kind: getattr(unit, kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    return [UnitKindCost(unit.fqn, *one) for one in kinds.items() if one[1].count_per_step]


def _show_longest_wait(exposed: Exposed, unit: UnitCost) -> None:
    """Show the longest exposed wait of all steps, with a link to the timeline."""
    name = format_unit(unit.fqn)
    shown: dict[str, Value] = {UNIT_KEY: name, RANK_KEY: exposed.rank}
    if exposed.evidence and exposed.evidence[0].exposed_ns:
        longest = exposed.evidence[0]
        shown[STEP_KEY] = longest.step
        causes = ", ".join(
            f"{format_cause(cause)} {format_ns(part)}" for cause, part in longest.causes_ns.items()
        )
        show_text(
            plain(
                f"Longest wait: {format_ns(longest.exposed_ns)} in step {longest.step}, "
                f"{format_kind(longest.kind)} in {longest.phase} ({causes})."
            )
        )
    page_link("timeline", "Show in timeline", **shown)


def _fits_of(history: UnitHistory, bandwidth: Bandwidth | None) -> dict[str, LinkFit]:
    """The fitted latency and bandwidth for each kind of collective of the unit."""
    kinds = bandwidth.kinds if bandwidth is not None else ()
    links = {(kind.kind, kind.group): kind.link for kind in kinds}
    found = {name_history(one): links.get((one.kind, one.group)) for one in history.histories}
    return {name: fit for name, fit in found.items() if fit is not None}


def _show_collectives(history: UnitHistory, fits: Mapping[str, LinkFit], summary: Summary) -> None:
    provenance = describe_provenance(
        summary.provenance, "all_gather", "reduce_scatter", "all_reduce"
    )
    left, right = st.columns(2)
    with left:
        show_chart_card(
            "Collectives over steps",
            draw_collectives(history, fits),
            frame_history(history),
            key="unit-history",
            alt=f"Duration of each collective of the unit in {history.num_steps} timed steps",
            note=f"{_describe_rates(history, fits)}Dotted line: the duration of such a message "
            f"by the fit of this run. {provenance}",
        )
    with right:
        show_chart_card(
            "Median duration of collectives",
            draw_spreads(history),
            frame_spreads(history, fits),
            key="unit-spreads",
            alt="Durations of the unit's collectives by kind and phase: p10, median and p90",
            note="Bars: p10 to p90 over the timed steps. Line and number: median. The table "
            "compares them with the fit.",
        )
        if history.holds or any(one.kind == "all_gather" for one in history.histories):
            _show_holds(history)


def _describe_rates(history: UnitHistory, fits: Mapping[str, LinkFit]) -> str:
    """The measured bus bandwidth by kind of collective, with the fitted one."""
    rates = []
    for one in history.histories:
        name = name_history(one)
        if one.bus_bytes_per_s is None or one.bytes is None:
            continue
        rate = f"{name} {format_bytes_per_s(one.bus_bytes_per_s)}"
        if name in fits:
            expected = fits[name].predict_bus_bytes_per_s(one.bytes)
            rate += f" (fit {format_bytes_per_s(expected)})"
        rates.append(rate)
    return f"Median bus bandwidth: {'; '.join(rates)}. " if rates else ""


def _show_prefetch(waits: RankWaits | None) -> None:
    prefetches = waits.prefetch.units if waits is not None and waits.prefetch else ()
    if not prefetches:
        show_empty_card(
            "Prefetch", "This unit has no all-gather in a timed step.", key="unit-prefetch"
        )
        return
    show_table_card(
        "Prefetch",
        frame_of(GATHERS, prefetches, *_PREFETCH_COLUMNS),
        key="unit-prefetch",
        alt="All-gathers of the unit, one row for each phase",
        note="Lead: time from the issue of the all-gather to its need. A lead as long as the time "
        "in flight hides it. Explicit: the hook of another unit issued it. Implicit: its own unit "
        "issued it early, because the host ran ahead. Missed: its own unit issued it when it was "
        "needed. Blocked: it blocked the host. First: no compute precedes it.",
    )


def _show_holds(history: UnitHistory | None) -> None:
    if history is None or not history.holds:
        show_empty_card(
            "Memory over the step",
            "This unit has no all-gather in a timed step.",
            key="unit-holds",
        )
        return
    show_chart_card(
        f"Memory over step {history.step}",
        draw_holds(history),
        frame_holds(history),
        key="unit-holds",
        alt=f"Spans of one step of {format_ns(history.step_time_ns)} in which the unit "
        "holds full parameters or buffers",
        note=f"Rank {history.rank}. Inferred from event times and parameter sizes. Shards "
        "are not drawn: they are always allocated.",
    )


def _show_parameters(record: Unit) -> None:
    if not record.parameters:
        show_empty_card(
            "Parameters",
            "Parameter names were not recorded. "
            f"Modules: {', '.join(map(format_unit, record.modules))}.",
            key="unit-parameters",
        )
        return
    show_table_card(
        f"Parameters: {len(record.parameters)}",
        frame_parameters(record),
        key="unit-parameters",
        alt="Parameters of the unit, one row each",
    )
