"""Measure one visit to a page of the dashboard in Chromium: its time and its data.

`watch.js` in the page decides, frame by frame, when the page is interactive. Bytes are the payloads
of the frames that arrive over the websocket (Chromium's `Network.webSocketFrameReceived`). Static
files do not count: they are in the browser's cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, WebSocket, sync_playwright

from tests.browser.conftest import CHROMIUM_ARGUMENTS
from tests.conftest import CHROMIUM_NAMES

REST_MS = 300
"""The time without data and drawing that follows an interactive page."""
_WATCH = (Path(__file__).parent / "watch.js").read_text()
_WINDOW_MS = 1500
"""The time until a new window is at rest. Chromium's own surface uses the processor for about a
second, and people open a page in an existing window."""
LONGEST_MS = 120_000
"""The time limit for a page to come to rest."""
_IS_AT_REST = f"""() => visit.interactiveMs !== null
  && performance.now() - visit.interactiveMs > {REST_MS}"""
_TURNS = 6
_TURN_PX = -300
_ERRORS = '[data-testid="stException"], [data-testid="stAlertContentError"]'
_CANVAS = "canvas[data-draws]"
_FOLLOW_ZOOM = """(canvas, length) => {
  const zoom = { beganMs: null, drawnMs: null, completeMs: null, worstFrameMs: 0 };
  const draws = canvas.dataset.draws;
  window.zoom = zoom;
  window.addEventListener(
    "wheel", () => (zoom.beganMs ??= performance.now()), { capture: true, passive: true }
  );
  let before = null;
  const look = (now) => {
    if (zoom.beganMs !== null && before !== null)
      zoom.worstFrameMs = Math.max(zoom.worstFrameMs, now - before);
    before = now;
    if (canvas.dataset.draws !== draws) zoom.drawnMs ??= now;
    const { startNs, endNs, complete } = canvas.dataset;
    if (complete === "true" && endNs - startNs < length) zoom.completeMs = now;
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


@dataclass(frozen=True, slots=True)
class Visit:
    """One opening of a page in a separate tab; times since the navigation began."""

    booted_ms: float
    """The time until Streamlit's own script has opened the websocket."""
    answered_ms: float
    """The time until the page's first line is present."""
    interactive_ms: float
    """The time until everything is drawn and frames are short again."""
    worst_frame_ms: float
    """The longest frame since the answer."""
    received_bytes: int
    busy_ms: float
    """CPU time of the tab's main thread until it was at rest, which other work on the machine
    hardly changes."""


@dataclass(frozen=True, slots=True)
class Zoom:
    """A few quick turns of the wheel over the timeline; times since the first turn."""

    drawn_ms: float
    """The time until the first picture, from data that the browser already has."""
    complete_ms: float
    """The time until the picture with the server's data for the narrower window."""
    worst_frame_ms: float
    received_bytes: int


class Tab:
    """An opened page with its figures."""

    def __init__(self, page: Page, visit: Visit, received: list[int]) -> None:
        self._page = page
        self._received = received
        self.visit = visit

    def zoom(self) -> Zoom:
        """Turn the wheel over the timeline until the window is a small part of the step."""
        canvas = self._page.locator(_CANVAS)
        length = canvas.evaluate("canvas => canvas.dataset.endNs - canvas.dataset.startNs")
        before = self._received[0]
        canvas.hover(position={"x": 700, "y": 60})
        canvas.evaluate(_FOLLOW_ZOOM, length / 20)
        for _ in range(_TURNS):
            self._page.mouse.wheel(0, _TURN_PX)
        self._page.wait_for_function("() => zoom.completeMs !== null")
        self._page.wait_for_timeout(REST_MS)
        told = self._page.evaluate("() => zoom")
        return Zoom(
            drawn_ms=told["drawnMs"] - told["beganMs"],
            complete_ms=told["completeMs"] - told["beganMs"],
            worst_frame_ms=told["worstFrameMs"],
            received_bytes=self._received[0] - before,
        )


@contextmanager
def browse() -> Iterator[BrowserContext]:
    """Open a Chromium that caches static files.

    Raises:
        RuntimeError: Chromium is missing.
    """
    found = [path for name in CHROMIUM_NAMES if (path := shutil.which(name))]
    if not found:
        raise RuntimeError(f"No browser: none of {', '.join(CHROMIUM_NAMES)}. Install chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found[0], args=list(CHROMIUM_ARGUMENTS)
        )
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(LONGEST_MS)
        context.add_init_script(_WATCH)
        yield context
        browser.close()


@contextmanager
def visit_page(context: BrowserContext, address: str) -> Iterator[Tab]:
    """Open an address in a new tab and wait until it is at rest; the tab is closed afterwards.

    Raises:
        RuntimeError: The page shows an error instead of its answer.
        playwright.sync_api.TimeoutError: The page does not come to rest.
    """
    page = context.new_page()
    page.wait_for_timeout(_WINDOW_MS)
    meter = context.new_cdp_session(page)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    received = [0]
    page.on("websocket", lambda socket: _count(socket, received))
    try:
        page.goto(address)
        page.wait_for_function(_IS_AT_REST)
        metrics = meter.send("Performance.getMetrics")["metrics"]
        told = page.evaluate("() => visit")
        _check(page, address)
        visit = Visit(
            booted_ms=told["bootedMs"],
            answered_ms=told["answeredMs"],
            interactive_ms=told["interactiveMs"],
            worst_frame_ms=told["worstFrameMs"],
            received_bytes=received[0],
            busy_ms=1e3 * next(one["value"] for one in metrics if one["name"] == "TaskDuration"),
        )
        yield Tab(page, visit, received)
    finally:
        page.close()


def _check(page: Page, address: str) -> None:
    shown = page.locator(_ERRORS)
    if shown.count():
        raise RuntimeError(f"{address} shows an error: {shown.first.inner_text()[:300]!r}.")


def _count(socket: WebSocket, received: list[int]) -> None:
    def add(payload: bytes | str) -> None:
        received[0] += len(payload)

    socket.on("framereceived", add)
