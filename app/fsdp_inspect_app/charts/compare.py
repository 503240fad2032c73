"""Draw the changes of a comparison as diverging bars.

Less is blue and more is orange, readable in both themes and with colour blindness. The texts have
signs as well.
"""

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.report.figure_style import ROW_HEIGHT, fill, memory_unit, name_rows, styled
from fsdp_inspect.report.palette import Look
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import NS_PER_MS

LESS = Look("less", "#0072B2", "#FFFFFF")
MORE = Look("more", "#E69F00", "#111418")

_ROOM_FOR_TEXT = 1.6

Change = tuple[str, int | None]
"""A name and its change; None: unknown on one side."""


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
