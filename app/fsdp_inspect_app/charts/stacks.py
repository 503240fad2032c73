"""Stacked bars side by side on one scale, each split into its parts."""

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.report import palette
from fsdp_inspect.report.figure_style import fill, memory_unit, name_rows, styled
from fsdp_inspect.report.palette import Look
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import NS_PER_MS
from fsdp_inspect_app.played_memory_looks import HELD_LOOKS

_LABELLED_RATIO = 0.07
_PARTS = {part.label: palette.PART_LOOKS[part] for part in palette.PART_LOOKS}

Stack = tuple[str, Mapping[str, int]]
"""A name, and its parts."""


def draw_steps(steps: Sequence[Stack]) -> go.Figure:
    """Steps as bars, from the top: by `StepPart`, ns."""
    return _draw(steps, _PARTS, format_ns, NS_PER_MS, "ms")


def draw_peaks(peaks: Sequence[Stack]) -> go.Figure:
    """Peaks of memory as bars, from the top: by `Held`, bytes."""
    size, suffix = memory_unit([amount for _, parts in peaks for amount in parts.values()])
    return _draw(peaks, HELD_LOOKS, format_bytes, size, suffix)


def _draw(
    stacks: Sequence[Stack],
    looks: Mapping[str, Look],
    format_value: Callable[[float | None], str],
    size: float,
    suffix: str,
) -> go.Figure:
    figure = go.Figure()
    longest = max((sum(parts.values()) for _, parts in stacks), default=0)
    for name, look in looks.items():
        rows = [
            (row, label, parts[name])
            for row, (label, parts) in enumerate(stacks)
            if parts.get(name)
        ]
        if rows:
            _draw_part(figure, look, rows, longest=longest, size=size, format_value=format_value)
    figure.update_layout(barmode="stack")
    name_rows(figure, [wording.label(label) for label, _ in stacks])
    figure.update_xaxes(range=[0, longest / size], ticksuffix=f" {suffix}", showgrid=False)
    return styled(figure, height=126 + 44 * len(stacks))


def _draw_part(
    figure: go.Figure,
    look: Look,
    rows: Sequence[tuple[int, str, int]],
    *,
    longest: int,
    size: float,
    format_value: Callable[[float | None], str],
) -> None:
    texts = [format_value(value) for _, _, value in rows]
    is_written = [value > _LABELLED_RATIO * longest and not look.hatched for _, _, value in rows]
    figure.add_bar(
        x=[value / size for _, _, value in rows],
        y=[row for row, _, _ in rows],
        width=0.76,
        orientation="h",
        name=look.label,
        marker=fill(look),
        text=[text if own else "" for text, own in zip(texts, is_written, strict=True)],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": look.ink, "size": 12},
        customdata=[
            f"{wording.label(label)}: {look.label} {text}"
            for (_, label, _), text in zip(rows, texts, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
