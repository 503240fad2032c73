"""How do runs look beside each other? Results of a comparison to figures; nothing is computed.

Less is blue and more is orange, on both themes and for every eye; signs say it too.
"""

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio
from fsdp_inspect.report import palette
from fsdp_inspect.report.palette import Look
from fsdp_inspect.trace.reduction import StepPart
from fsdp_inspect_app import wording
from fsdp_inspect_app.charts.style import ROW_HEIGHT, fill, memory_unit, name_rows, styled
from fsdp_inspect_app.frames.values import NS_PER_MS, ms

LESS = Look("less", "#0072B2", "#FFFFFF")
MORE = Look("more", "#E69F00", "#111418")

_LABELLED_RATIO = 0.07
_ROOM_FOR_TEXT = 1.6
_PARTS = {part.label: part for part in StepPart}

Change = tuple[str, int | None]
"""A name, and by how much it changed; None: not known on both sides."""


def draw_steps(breakdowns: Sequence[tuple[str, StepBreakdown]]) -> go.Figure:
    """The median step of each side as a bar, all on one scale.

    Args:
        breakdowns: The side's label and its step, from top to bottom.
    """
    figure = go.Figure()
    longest = max((step.step_time_ns for _, step in breakdowns), default=0)
    names = dict.fromkeys(part.name for _, step in breakdowns for part in step.parts)
    for name in names:
        _draw_part(figure, name, breakdowns, longest)
    figure.update_layout(barmode="stack")
    name_rows(figure, [wording.label(label) for label, _ in breakdowns])
    figure.update_xaxes(range=[0, ms(longest)], ticksuffix=" ms", showgrid=False)
    return styled(figure, height=126 + 44 * len(breakdowns))


def _draw_part(
    figure: go.Figure,
    name: str,
    breakdowns: Sequence[tuple[str, StepBreakdown]],
    longest: int,
) -> None:
    look = palette.PART_LOOKS[_PARTS[name]]
    parts = [
        (row, label, part)
        for row, (label, step) in enumerate(breakdowns)
        for part in step.parts
        if part.name == name and part.duration_ns
    ]
    if not parts:
        return
    texts = [format_ns(part.duration_ns) for _, _, part in parts]
    has_room = [part.duration_ns > _LABELLED_RATIO * longest for _, _, part in parts]
    figure.add_bar(
        x=[ms(part.duration_ns) for _, _, part in parts],
        y=[row for row, _, _ in parts],
        width=0.76,
        orientation="h",
        name=look.label,
        marker=fill(look),
        text=[
            text if room and not look.hatched else ""
            for text, room in zip(texts, has_room, strict=True)
        ],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": look.ink, "size": 12},
        customdata=[
            f"{wording.label(label)}: {look.label} {text}, {format_ratio(part.ratio)} of its step"
            for (_, label, part), text in zip(parts, texts, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def draw_time_changes(changes: Sequence[Change]) -> go.Figure:
    """Diverging bars of times in ns, from the top."""
    return _draw_changes(changes, format_ns, NS_PER_MS, "ms")


def draw_memory_changes(changes: Sequence[Change]) -> go.Figure:
    """Diverging bars of bytes, from the top."""
    size, suffix = memory_unit([abs(change or 0) for _, change in changes])
    return _draw_changes(changes, format_bytes, size, suffix)


def _draw_changes(
    changes: Sequence[Change], format_value: Callable[[int], str], size: float, suffix: str
) -> go.Figure:
    figure = go.Figure()
    for look, sign in ((LESS, -1), (MORE, 1)):
        rows = [(row, name, change) for row, (name, change) in enumerate(changes)
                if change is not None and change * sign > 0]  # fmt: skip
        if not rows:
            continue
        texts = [f"{'+' if sign > 0 else '-'}{format_value(abs(change))}" for _, _, change in rows]
        figure.add_bar(
            x=[change / size for _, _, change in rows],
            y=[row for row, _, _ in rows],
            width=0.76,
            orientation="h",
            name=look.label,
            marker=fill(look),
            text=texts,
            textposition="outside",
            textfont={"size": 12},
            cliponaxis=False,
            customdata=[
                f"{wording.label(name)}: {text}"
                for (_, name, _), text in zip(rows, texts, strict=True)
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    name_rows(figure, [wording.label(name) for name, _ in changes])
    widest = max((abs(change or 0) for _, change in changes), default=0) or 1
    reach = _ROOM_FOR_TEXT * widest / size
    figure.update_xaxes(ticksuffix=f" {suffix}", range=[-reach, reach], nticks=7, zeroline=True)
    return styled(figure, height=96 + ROW_HEIGHT * max(len(changes), 3))
