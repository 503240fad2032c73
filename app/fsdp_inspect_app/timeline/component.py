"""How does a timeline get onto the page? A Streamlit component around one canvas."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from fsdp_inspect_app.timeline.lod import View

_HERE = Path(__file__).parent

_HTML = """
<div class="timeline">
  <div class="bar">
    <button type="button" data-command="zoom-in" aria-label="Zoom in" title="Zoom in">+</button>
    <button type="button" data-command="zoom-out" aria-label="Zoom out" title="Zoom out">−</button>
    <button type="button" data-command="fit" title="Show the whole step">Fit</button>
    <button type="button" data-command="png" title="Save the picture">PNG</button>
    <span class="hint">zoom: wheel, W S · pan: drag, A D · fit: double-click · measure:
      shift-drag · step through: arrow keys</span>
  </div>
  <div class="stage">
    <canvas role="img" tabindex="0" aria-label="Timeline"></canvas>
    <div class="tip" hidden></div>
    <div class="live" aria-live="polite"></div>
  </div>
  <div class="legend"></div>
</div>
"""

_mount = st.components.v2.component(
    "fsdp_inspect_timeline",
    html=_HTML,
    css=(_HERE / "timeline.css").read_text(encoding="utf-8"),
    js=(_HERE / "timeline.js").read_text(encoding="utf-8"),
)


def show_timeline(payload: bytes, *, key: str) -> None:
    """Draw a packed timeline; what the browser did is in session state under `key`."""
    _mount(data=payload, key=key, on_view_change=lambda: None, on_selected_change=lambda: None)


def asked_view(state: Mapping[str, Any], *, key: str, end_ns: int) -> View | None:
    """The window that the browser asked for; None if it asked for none of this drawing.

    Args:
        state: The component's session state; its values come from the browser.
        key: Identity of the drawing.
        end_ns: End of the drawing's axis.
    """
    asked = state.get("view")
    if not isinstance(asked, dict) or asked.get("key") != key:
        return None
    start, end, width = (asked.get(name) for name in ("start_ns", "end_ns", "width_px"))
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(width, int)):
        return None
    start, end = max(start, 0), min(end, end_ns)
    return View(start, end, min(max(width, 1), 8192)) if start < end else None


def selected_event(state: Mapping[str, Any], *, key: str, num_events: int) -> int | None:
    """The event that was clicked in the drawing of that identity; None if none was."""
    selected = state.get("selected")
    if not isinstance(selected, dict) or selected.get("key") != key:
        return None
    chosen = selected.get("event")
    return chosen if isinstance(chosen, int) and 0 <= chosen < num_events else None
