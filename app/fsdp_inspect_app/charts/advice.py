"""Figures of plans by step time and memory. Nothing is computed here."""

import plotly.graph_objects as go

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.report.figure_style import NEUTRAL, memory_unit, styled
from fsdp_inspect.result_types import PlanAdvice
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import ms

RECORDED, PLANS, ADVISED = "#56B4E9", "#009E73", "#D55E00"
_HEIGHT = 360


def draw_front(plan: PlanAdvice) -> go.Figure:
    """Draw the best plans, from the fastest to the smallest, and the recorded one.

    The first trace holds the plans in the order of `plan.front`; points without a known peak are
    left out.
    """
    points = [point for point in plan.front if point.peak_bytes is not None]
    peaks = [point.peak_bytes or 0 for point in points]
    size, suffix = memory_unit([*peaks, plan.replayed_peak_bytes or 0])
    figure = go.Figure()
    figure.add_scatter(
        x=[ms(point.step_ns) for point in points],
        y=[peak / size for peak in peaks],
        mode="lines+markers",
        name="best plans",
        line={"color": PLANS, "width": 1.5, "shape": "vh", "dash": "dot"},
        marker={"size": 11, "color": PLANS},
        customdata=[
            f"{wording.label(point.what)}<br>{format_ns(point.step_ns)} a step, peak "
            f"{format_bytes(point.peak_bytes)}"
            for point in points
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    _draw_marked(figure, plan, size)
    if plan.memory_limit_bytes is not None and plan.memory_limit_bytes <= 3 * max(peaks):
        figure.add_hline(
            y=plan.memory_limit_bytes / size,
            line={"color": NEUTRAL, "width": 1, "dash": "dash"},
            annotation={"text": f"limit {format_bytes(plan.memory_limit_bytes)}"},
            annotation_position="top right",
        )
    figure.update_xaxes(title={"text": "predicted step time", "standoff": 6}, ticksuffix=" ms")
    figure.update_yaxes(
        title={"text": "predicted peak", "standoff": 6}, ticksuffix=f" {suffix}", automargin=True
    )
    return styled(figure, height=_HEIGHT)


def _draw_marked(figure: go.Figure, plan: PlanAdvice, size: int) -> None:
    """The recorded plan and the advised one."""
    fastest = plan.fastest
    marked = (
        (
            "recorded plan, simulated",
            plan.replayed_step_ns,
            plan.replayed_peak_bytes,
            RECORDED,
            "x",
        ),
        ("advised", fastest.step_ns, fastest.peak_bytes, ADVISED, "circle-open"),
    )
    for name, step_ns, peak_bytes, colour, symbol in marked:
        if peak_bytes is None:
            continue
        figure.add_scatter(
            x=[ms(step_ns)],
            y=[peak_bytes / size],
            mode="markers",
            name=name,
            marker={"size": 17, "color": colour, "symbol": symbol, "line": {"width": 3}},
            hovertemplate=f"{name}: {format_ns(step_ns)} a step, peak {format_bytes(peak_bytes)}"
            "<extra></extra>",
        )
