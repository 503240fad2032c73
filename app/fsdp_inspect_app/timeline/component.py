"""Show the timeline on a page: a Streamlit component with one canvas.

    step = loading.timeline_of(entry, step=12, ranks=(0, 1))      # cached; a TrackSet
    show_timeline([step], key="timeline")

Several steps are drawn above each other on one axis, aligned at their starts, and zoom together:

    show_timeline(
        [replace(step_a, title="A: baseline"), replace(step_b, title="B: no reshard")],
        key="compared",
    )

A prediction is drawn from its events:

    predicted = TrackSet(draw_events(simulation.predicted.events, rank=0), manifest)

`show_timeline` is a fragment: zooming and selecting run only the fragment again. A page may pass
`explain` to show details of the selection above the canvas; it then runs again too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from fsdp_inspect_app.page_sheet import SheetDrawing, page_sheet
from fsdp_inspect_app.timeline.difference import Difference
from fsdp_inspect_app.timeline.payload import describe_tracks, encode_tracks
from fsdp_inspect_app.timeline.request import Jump, TimelineRequest, read_request
from fsdp_inspect_app.timeline.track_set import Place, Tracks, TrackSet

_HERE = Path(__file__).parent
_SCRIPTS = ("words.js", "layout.js", "drawing.js", "painter.js", "timeline.js")
"""The scripts in order; together they are one module."""


def _read(name: str) -> str:
    return (_HERE / "browser" / name).read_text(encoding="utf-8")


MARKUP, STYLE = _read("timeline.html"), _read("timeline.css")
SCRIPT = "\n".join(_read(name) for name in _SCRIPTS)

_mount = st.components.v2.component("fsdp_inspect_timeline", html=MARKUP, css=STYLE, js=SCRIPT)


@dataclass
class _Jumps:
    """Session state: the jumps of the page in each drawing."""

    drawn: str
    latest: Jump | None = None


@st.fragment
def show_timeline(  # noqa: PLR0913 (every argument is a part of the drawing, all by name)
    tracks: Sequence[TrackSet],
    *,
    key: str,
    opening: TimelineRequest | None = None,
    explain: Callable[[TimelineRequest], None] | None = None,
    sum_up: Callable[[Tracks, TimelineRequest], None] | None = None,
    difference: Difference | None = None,
    is_linked: bool = False,
) -> None:
    """Draw one or several steps on one axis that begins at their starts.

    Args:
        tracks: The steps from the top, at least one. If there are several, each needs a title.
        key: The key of the component, unique on the page.
        opening: The initial state: window, selection, unit, pins.
        explain: Called above the canvas with the current state, at every change. Its widgets may
            call `jump_to`.
        sum_up: Called below the canvas with the drawing and the state, for the selected range.
        difference: The difference to another run, for the strip below a rank.
        is_linked: Whether the page's address supports `window`, `span`, `range`, `top` and `unit`,
            so that a copied link contains them.
    """
    drawn = Tracks(tuple(tracks))
    state = st.session_state.get(key) or {}
    asked = read_request(state, drawn, opening=opening or TimelineRequest())
    jump = _latest_jump(key, drawn.key)
    payload = encode_tracks(drawn, asked, jump=jump, difference=difference, is_linked=is_linked)
    # Fullscreen shows this part of the page.
    with page_sheet().section(f"timeline {key}"), st.container(key=f"frame-{key}"):
        above = st.container()
        _mount(data=payload, key=key, on_asked_change=lambda: None)
        if explain is not None:
            with above:  # after the canvas is sent
                explain(asked)
        page_sheet().add(SheetDrawing(payload, describe_tracks(drawn)))
        if sum_up is not None:
            sum_up(drawn, asked)


def jump_to(key: str, place: Place) -> None:
    """Select an event of a drawing and show it; for callbacks of buttons."""
    jumps = st.session_state.get(_jumps_key(key))
    if isinstance(jumps, _Jumps):
        jumps.latest = Jump(jumps.latest.serial + 1 if jumps.latest else 1, place)


def _latest_jump(key: str, drawn: str) -> Jump | None:
    """The last jump of the page in this drawing; None: no jump yet."""
    jumps = st.session_state.get(_jumps_key(key))
    if not isinstance(jumps, _Jumps) or jumps.drawn != drawn:
        jumps = st.session_state[_jumps_key(key)] = _Jumps(drawn)
    return jumps.latest


def _jumps_key(key: str) -> str:
    return f"{key}: jumps"
