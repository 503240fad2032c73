"""Figures of memory. Nothing is computed here."""

from collections.abc import Sequence

import plotly.graph_objects as go

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.report import palette
from fsdp_inspect.report.figure_style import (
    NEUTRAL,
    PAIRED_HEIGHT,
    SHADE,
    line_mode,
    memory_unit,
    name_rows,
    over_steps,
    shade_steps,
    styled,
)
from fsdp_inspect.result_types import AllocatorUse, MemoryOfStep, PlaceSpan, RankMemory, StepMemory
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.memory import name_place
from fsdp_inspect_app.frames.values import ms

_PHASE_LOOKS = {
    "forward": palette.FORWARD,
    "backward": palette.BACKWARD,
    "optimizer": palette.OPTIMIZER,
    "data": palette.DATA,
}
_STEP_HEIGHT = 430
_NAMED_RATIO = 0.06
_FEW_RANKS = 16
_STRIP_COLOURS = ("#5B6975", "#76889A")


def draw_step_memory(memory: StepMemory) -> go.Figure:
    """Memory through one step: areas by category, lines, phases, units, and the peak by name."""
    figure = go.Figure()
    amounts = [reading.highest_bytes for reading in memory.readings]
    amounts += [reading.reserved_bytes or 0 for reading in memory.readings]
    size, suffix = memory_unit(amounts)
    _add_areas(figure, memory, size, suffix)
    _add_lines(figure, memory, size, suffix)
    _add_units(figure, memory.units)
    _add_phases(figure, memory)
    _name_peak(figure, memory, size)
    figure.update_layout(
        yaxis={"domain": [0.1, 1], "ticksuffix": f" {suffix}", "rangemode": "tozero"},
        yaxis2={"domain": [0, 0.07], "visible": False, "range": [-0.5, 0.5]},
        uniformtext={"minsize": 9, "mode": "hide"},
        barmode="overlay",
    )
    figure.update_xaxes(ticksuffix=" ms", anchor="y2", showgrid=False)
    return styled(figure, height=_STEP_HEIGHT)


def _add_areas(figure: go.Figure, memory: StepMemory, size: int, suffix: str) -> None:
    if memory.composition is None:
        return
    offsets = [ms(offset) for offset in memory.composition.offsets_ns]
    for series in memory.composition.series:
        look = palette.MEMORY_LOOKS[series.category]
        figure.add_scatter(
            x=offsets,
            y=[held / size for held in series.bytes],
            name=look.label,
            stackgroup="categories",
            mode="lines",
            line={"width": 0},
            fillcolor=look.colour,
            hovertemplate=f"{look.label}: %{{y:,.2f}} {suffix}<extra></extra>",
        )


def _add_lines(figure: go.Figure, memory: StepMemory, size: int, suffix: str) -> None:
    offsets = [ms(reading.offset_ns) for reading in memory.readings]
    places = [
        f"{wording.label(name_place(reading.fqn))} · {reading.phase} · "
        f"{reading.point.replace('_', ' ')}"
        for reading in memory.readings
    ]
    figure.add_scatter(
        x=offsets,
        y=[reading.allocated_bytes / size for reading in memory.readings],
        name="allocated",
        mode="lines+markers",
        line={"color": NEUTRAL, "width": 2},
        marker={"size": 5},
        customdata=places,
        hovertemplate=f"%{{customdata}}: %{{y:,.2f}} {suffix} allocated<extra></extra>",
    )
    if memory.is_allocator:
        figure.add_scatter(
            x=offsets,
            y=[
                None if reading.reserved_bytes is None else reading.reserved_bytes / size
                for reading in memory.readings
            ],
            name="reserved",
            mode="lines",
            line={"color": NEUTRAL, "width": 1.5, "dash": "dash"},
            hovertemplate=f"%{{y:,.2f}} {suffix} reserved<extra></extra>",
        )


def _add_units(figure: go.Figure, units: Sequence[PlaceSpan]) -> None:
    """Draw a strip with a box for each time range of one unit."""
    boxes = [unit for unit in units if unit.name is not None]
    names = [wording.label(name_place(unit.name)) for unit in boxes]
    figure.add_bar(
        x=[ms(unit.end_ns - unit.start_ns) for unit in boxes],
        base=[ms(unit.start_ns) for unit in boxes],
        y=[0] * len(boxes),
        width=1,
        orientation="h",
        yaxis="y2",
        marker={
            "color": [_STRIP_COLOURS[place % 2] for place in range(len(boxes))],
            "line": {"width": 0},
        },
        text=names,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 10, "color": "#FFFFFF"},
        customdata=names,
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )


def _add_phases(figure: go.Figure, memory: StepMemory) -> None:
    whole_ns = max((phase.end_ns for phase in memory.phases), default=0)
    for phase in memory.phases:
        look = _PHASE_LOOKS.get(phase.name or "")
        if look is None:
            continue
        figure.add_vline(
            x=ms(phase.start_ns), line={"color": NEUTRAL, "width": 1, "dash": "dot"}, layer="below"
        )
        if phase.end_ns - phase.start_ns > _NAMED_RATIO * whole_ns:
            figure.add_annotation(
                x=ms(phase.start_ns),
                y=1,
                yref="paper",
                xanchor="left",
                yanchor="bottom",
                text=look.label,
                showarrow=False,
                font={"size": 11},
            )


def _name_peak(figure: go.Figure, memory: StepMemory, size: int) -> None:
    """Draw an arrow to the peak, above everything else."""
    peak = memory.peak
    highest = max(peak.highest_bytes, *(one.reserved_bytes or 0 for one in memory.readings))
    figure.add_annotation(
        x=ms(peak.offset_ns),
        y=peak.highest_bytes / size,
        ax=ms(peak.offset_ns),
        ay=1.16 * highest / size,
        axref="x",
        ayref="y",
        text=f"<b>peak {format_bytes(peak.highest_bytes)}</b><br>"
        f"{wording.label(name_place(peak.fqn))} · {peak.phase}",
        showarrow=True,
        arrowhead=2,
        arrowcolor=NEUTRAL,
        align="center",
        font={"size": 12},
    )
    figure.update_layout(yaxis_range=[0, 1.3 * highest / size])


def draw_growth(steps: Sequence[MemoryOfStep], warmup: Sequence[int]) -> go.Figure:
    """Draw the peak of each step, and the memory that is allocated at its end."""
    figure = go.Figure()
    numbers = [step.step for step in steps]
    lines = (
        (
            "reserved at most",
            [step.highest_reserved_bytes for step in steps],
            {"color": NEUTRAL, "width": 1.5, "dash": "dash"},
        ),
        (
            "allocated at most",
            [step.highest_allocated_bytes for step in steps],
            {"color": NEUTRAL, "width": 2},
        ),
        (
            "allocated at the end",
            [step.allocated_at_end_bytes for step in steps],
            {"color": palette.OPTIMIZER.colour, "width": 2},
        ),
    )
    size, suffix = memory_unit([held or 0 for _, series, _ in lines for held in series])
    for name, series, line in lines:
        if all(held is None for held in series):
            continue
        figure.add_scatter(
            x=numbers,
            y=[None if held is None else held / size for held in series],
            name=name,
            mode=line_mode(steps),
            line=line,
            marker={"size": 5},
            hovertemplate=f"step %{{x}}: %{{y:,.2f}} {suffix} {name}<extra></extra>",
        )
    shade_steps(figure, warmup, "warm-up")
    figure.update_yaxes(ticksuffix=f" {suffix}", rangemode="tozero")
    return over_steps(figure)


def draw_rank_memory(ranks: Sequence[RankMemory], shown: int | None) -> go.Figure:
    """The peaks of every rank; the shown one is marked."""
    known = [rank for rank in ranks if rank.peak_allocated_bytes is not None]
    size, suffix = memory_unit([rank.peak_allocated_bytes or 0 for rank in known])
    figure = go.Figure()
    for name, values, symbol in (
        ("peak reserved", [rank.peak_reserved_bytes for rank in known], "line-ew-open"),
        ("peak allocated", [rank.peak_allocated_bytes for rank in known], "circle"),
    ):
        if all(value is None for value in values):
            continue
        figure.add_scatter(
            x=[rank.rank for rank in known],
            y=[None if value is None else value / size for value in values],
            name=name,
            mode="markers",
            marker={
                "size": [10 if rank.rank == shown else 6 for rank in known],
                "symbol": symbol,
                "color": NEUTRAL,
            },
            hovertemplate=f"rank %{{x}}: %{{y:,.3f}} {suffix} {name}<extra></extra>",
        )
    figure.update_yaxes(ticksuffix=f" {suffix}")
    figure.update_xaxes(
        title={"text": "rank", "standoff": 6},
        tickformat="d",
        dtick=1 if len(known) <= _FEW_RANKS else None,
        showgrid=False,
    )
    return styled(figure, height=PAIRED_HEIGHT)


def draw_allocator(use: AllocatorUse, device_bytes: int | None) -> go.Figure:
    """Draw nested bars: allocated, active, reserved, and in use on the device."""
    rows = [
        ("allocated", use.allocated_bytes, palette.ALL_GATHER.colour),
        ("active", use.active_bytes, "#56B4E9"),
        ("reserved", use.reserved_bytes, NEUTRAL),
        ("in use on the device (NVML)", use.device_used_bytes, "#E69F00"),
        ("the device", device_bytes, SHADE),
    ]
    known = [row for row in rows if row[1] is not None]
    size, suffix = memory_unit([amount or 0 for _, amount, _ in known])
    figure = go.Figure()
    figure.add_bar(
        x=[(amount or 0) / size for _, amount, _ in known],
        y=list(range(len(known))),
        orientation="h",
        marker={"color": [colour for _, _, colour in known], "line": {"width": 0}},
        text=[format_bytes(amount) for _, amount, _ in known],
        textposition="outside",
        textfont={"size": 12},
        cliponaxis=False,
        hovertemplate=f"%{{x:,.2f}} {suffix}<extra></extra>",
    )
    name_rows(figure, [name for name, _, _ in known])
    largest = max((amount or 0 for _, amount, _ in known), default=0)
    figure.update_xaxes(ticksuffix=f" {suffix}", range=[0, 1.25 * largest / size], nticks=6)
    return styled(figure, height=PAIRED_HEIGHT)
