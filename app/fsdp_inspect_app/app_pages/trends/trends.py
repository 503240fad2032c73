"""Page Trends: one metric over all runs of the catalog, with its change points."""

import pandas as pd
import pyarrow as pa
import streamlit as st

from fsdp_inspect.catalog.trends import (
    METRICS_OF_RUNS,
    MODEL_AND_RANKS,
    POINTS_FOR_A_CHANGE,
    Trend,
    TrendAxis,
    TrendChange,
    find_run_metric,
    measure_trend,
)
from fsdp_inspect.columns import format_value
from fsdp_inspect.formatting import capitalize, listed, plural
from fsdp_inspect_app.app_pages.trends.charts import MOST_SERIES, draw_trend
from fsdp_inspect_app.cards import show_card, show_chart_card, show_headline, show_note, show_text
from fsdp_inspect_app.catalog_reading import KnownCatalog, open_page, show_reading
from fsdp_inspect_app.run_filters import pick_filter
from fsdp_inspect_app.selection import BASELINE_KEY, WITH_KEY, page_link, pick
from fsdp_inspect_app.wording import code, plain

_AXES = {
    TrendAxis.TIME: "time",
    TrendAxis.COMMIT: "commit",
    TrendAxis.TAG: "tag",
    TrendAxis.WORLD_SIZE: "world size",
}
_TOGETHER = "model and ranks"
_MOST_CHANGES, _MOST_NAMED = 20, 3


def show_page() -> None:
    """Show the headline, the pickers, the chart and the change points."""
    opened = open_page()
    if opened is None:
        return
    folder, entries, catalog, is_complete = opened
    answer = st.container()
    metric, axis, split = _pick(catalog)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        where = pick_filter(catalog)
    chosen = tuple((setting, tuple(values)) for setting, values in where.items())
    trend = _measure(catalog.generation, metric, axis, split, chosen, catalog.runs)
    with answer:
        show_headline(_answer(trend))
    if not trend.points:
        st.info("No run matches, or none has this metric. Choose another metric or filter.")
        return
    _show_chart(trend)
    _show_changes(trend)
    if not is_complete:
        show_reading(folder, entries)


@st.cache_resource(max_entries=32, show_spinner="Looking for change points")
def _measure(
    generation: str,
    metric: str,
    axis: TrendAxis,
    split: tuple[str, ...],
    where: tuple[tuple[str, tuple[str, ...]], ...],
    _runs: pa.Table,
) -> Trend:
    return measure_trend(_runs, metric, axis=axis, split=split, where=dict(where))


def _pick(catalog: KnownCatalog) -> tuple[str, TrendAxis, tuple[str, ...]]:
    splits = [_TOGETHER, *catalog.settings]
    with st.container(horizontal=True):
        metric = pick(
            "Metric",
            METRICS_OF_RUNS,
            METRICS_OF_RUNS[0],
            name="metric",
            format_func=lambda name: find_run_metric(name).label,
        )
        axis = pick("Over", [*TrendAxis], TrendAxis.TIME, name="axis", format_func=_AXES.get)
        split = pick("Series", splits, _TOGETHER, name="split", is_default_hidden=True)
    return metric, axis, MODEL_AND_RANKS if split == _TOGETHER else (split,)


def _answer(trend: Trend) -> str:
    if trend.changes:
        last = max(trend.changes, key=lambda change: _start_of(trend, change))
        ratio = plain(f"{100 * last.change_ratio:+.3g}%")
        return f"{plain(capitalize(trend.label))} changed by {ratio} at {code(last.run)}\\."
    judged = trend.judged_series or trend.series
    count = sum(len(point.runs) for point in trend.points if point.series in judged)
    runs = plural(count, "run")
    if trend.axis in (TrendAxis.TIME, TrendAxis.COMMIT):
        found = f"no change point in {runs}"
        if not trend.judged_series:
            found = f"cannot tell, because {POINTS_FOR_A_CHANGE} points above 0 are needed"
        return plain(f"{capitalize(trend.label)}: {found}.")
    return plain(f"{capitalize(trend.label)} of {runs} by {_AXES[trend.axis]}.")


def _start_of(trend: Trend, change: TrendChange) -> int:
    return next(point.created_unix_ns for point in trend.points if point.runs[0] == change.run)


def _show_chart(trend: Trend) -> None:
    left_out = f" {trend.num_left_out:,} runs have no value on one of the axes." * bool(
        trend.num_left_out
    )
    rest = len(trend.series) - MOST_SERIES
    hidden = f" {rest:,} smaller series are not drawn." if rest > 0 else ""
    show_chart_card(
        f"{capitalize(trend.label)} over {_AXES[trend.axis]}",
        draw_trend(trend),
        lambda: _frame(trend),
        key="trend",
        alt=f"{trend.label} of each run over {_AXES[trend.axis]}",
        note="Typical step of the median rank, or the rank with the highest peak. Points of a "
        "commit, tag or world size are medians over their runs. Dotted: change points."
        + hidden
        + left_out,
        below=_note_plain(trend),
    )


def _note_plain(trend: Trend) -> str:
    """Name the runs whose values do not describe most of their steps; empty: none."""
    runs = trend.other_plain_runs
    if not runs:
        return ""
    named = listed([code(run) for run in runs], _MOST_NAMED)
    words = plain("Plain steps differ clearly from the detailed steps of this chart: ")
    return f"{words}{named}\\."


def _frame(trend: Trend) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "series": point.series,
                _AXES[trend.axis]: point.label,
                trend.label: format_value(trend.unit, point.value),
                "runs": len(point.runs),
                "first run": point.runs[0],
            }
            for point in trend.points
        ]
    )


def _show_changes(trend: Trend) -> None:
    if trend.axis not in (TrendAxis.TIME, TrendAxis.COMMIT):
        return
    with show_card("Change points", key="changes"):
        if not trend.changes:
            show_note(
                f"{'None' if trend.judged_series else 'Cannot tell'}. A change point needs at "
                f"least {POINTS_FOR_A_CHANGE // 2} points of a series on each side, all above 0, "
                "and medians that differ by 10%, or by 1% for memory\\."
            )
        for number, change in enumerate(trend.changes[:_MOST_CHANGES]):
            _show_change(trend, change, number)
        show_note("A change point says when the level changed, not why. Compare shows what else.")


def _show_change(trend: Trend, change: TrendChange, number: int) -> None:
    before, after = (format_value(trend.unit, one) for one in (change.before, change.after))
    with st.container(horizontal=True, vertical_alignment="center", key=f"change-{number}"):
        show_text(
            f"{code(change.run)}: {plain(f'{100 * change.change_ratio:+.3g}%')}, from "
            f"{plain(before)} to {plain(after)} \\({plain(change.series)}\\)"
        )
        page_link(
            "compare",
            "Compare with the run before",
            run=change.run,
            **{BASELINE_KEY: change.run_before, WITH_KEY: [change.run]},
        )


show_page()
