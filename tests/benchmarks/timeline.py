"""How quickly is the timeline of very many intervals there, and how much does it send?

Measured in Chromium against the real server on this machine: 16 ranks of one step. Time to
interactive is from the navigation to the first picture after which nothing else is drawn for
300 ms; a step that was never laid out before (cold) and one that was (warm). A zoom is from the
first turn of the wheel to the picture made of what the server sent for the new window.
"""

from __future__ import annotations

import shutil
import socket
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, WebSocket, sync_playwright

from tests.benchmarks.crowded_step import NUM_RANKS, write_crowded_run
from tests.benchmarks.figures import Figure
from tests.browser.conftest import CHROMIUM_ARGUMENTS, serve

SIZES = (10_000, 100_000, 1_000_000)
_REPEATS = 3
_TURNS = 6
_QUIET_MS = 300
_FIND = """const find = (root) => root.querySelector('canvas[data-draws]')
    || [...root.querySelectorAll('*')].filter((node) => node.shadowRoot)
      .map((node) => find(node.shadowRoot)).find(Boolean);
  const canvas = find(document);"""
_WATCH = f"""() => {{
  {_FIND}
  if (!canvas) return false;
  if (window.drawn !== canvas.dataset.draws) {{
    window.drawn = canvas.dataset.draws;
    window.drawnAt = performance.now();
    return false;
  }}
  return performance.now() - window.drawnAt > {_QUIET_MS} && window.drawnAt;
}}"""
_ZOOMED = f"""length => {{
  {_FIND}
  const {{ startNs, endNs, complete }} = canvas.dataset;
  return complete === 'true' && endNs - startNs < length && performance.now();
}}"""


@dataclass(frozen=True, slots=True)
class Opened:
    """One visit of the page."""

    interactive_ms: float
    received_bytes: int
    zoom_ms: float
    zoom_bytes: int


def measure_timeline(folder: Path, *, sizes: tuple[int, ...] = SIZES) -> list[Figure]:
    """Time to interactive, zoom latency and bytes of the timeline, by number of intervals.

    Args:
        folder: Where the runs are written; made if missing.
        sizes: Intervals of the step.
    """
    for size in sizes:
        write_crowded_run(folder / f"intervals-{size}", size)
    figures: list[Figure] = []
    log = folder / "server.log"
    with serve(folder, _free_port(), log) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(CHROMIUM_ARGUMENTS)
        )
        _open(browser, f"{address}/runs")
        for size in sizes:
            ranks = "&".join(f"rank={rank}" for rank in range(NUM_RANKS))
            page = f"{address}/timeline?run=intervals-{size}&step=0&{ranks}"
            cold, *warm = [_open(browser, page, zoom=True) for _ in range(1 + _REPEATS)]
            figures += _figures(size, cold, warm)
        browser.close()
    return figures


def _figures(size: int, cold: Opened | None, warm: list[Opened | None]) -> Iterator[Figure]:
    assert cold is not None
    visits = [visit for visit in warm if visit is not None]
    how = f"Measured in Chromium: {NUM_RANKS} ranks, one step, median of {_REPEATS} visits."
    first = cold.interactive_ms
    ready = statistics.median(visit.interactive_ms for visit in visits)
    zoom = statistics.median(visit.zoom_ms for visit in visits)
    largest = max(max(visit.received_bytes, visit.zoom_bytes) for visit in [cold, *visits])
    yield Figure(
        name=f"timeline of {size:,} intervals, first visit",
        value=f"{first / 1e3:.2f} s",
        how="Measured in Chromium: one visit; the server had read nothing of the run before.",
        numbers={"interactive_ms": first},
    )
    yield Figure(
        name=f"timeline of {size:,} intervals, interactive",
        value=f"{ready / 1e3:.2f} s",
        aim="< 2 s",
        how=f"{how} From the navigation to the last picture before 300 ms of rest.",
        numbers={"interactive_ms": ready},
    )
    yield Figure(
        name=f"timeline of {size:,} intervals, zoom",
        value=f"{zoom / 1e3:.2f} s",
        aim="< 1 s",
        how=f"{how} From the first turn of the wheel to the picture of what was sent for it.",
        numbers={"zoom_ms": zoom},
    )
    yield Figure(
        name=f"timeline of {size:,} intervals, a view",
        value=f"{largest / 1e6:.2f} MB",
        aim="< 1 MB",
        how="Measured: the most that a visit or a zoom received over the websocket.",
        numbers={"bytes": largest},
    )


def _open(browser: Browser, address: str, *, zoom: bool = False) -> Opened | None:
    """Visit a page with an empty cache; its figures if it is a timeline that is zoomed."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)
    received = [0]
    page.on("websocket", lambda socket: _count(socket, received))
    page.goto(address)
    if not zoom:
        page.locator(".st-key-headline").wait_for()
        context.close()
        return None
    interactive_ms = _wait(page, _WATCH)
    loaded = received[0]
    zoom_ms = _zoom(page)
    zoomed = received[0] - loaded
    context.close()
    return Opened(interactive_ms, loaded, zoom_ms, zoomed)


def _zoom(page: Page) -> float:
    canvas = page.locator("canvas[data-draws]")
    length = canvas.evaluate("canvas => canvas.dataset.endNs - canvas.dataset.startNs")
    canvas.hover(position={"x": 700, "y": 60})
    begin = float(page.evaluate("() => performance.now()"))
    for _ in range(_TURNS):
        page.mouse.wheel(0, -300)
    end = page.wait_for_function(_ZOOMED, arg=length / 20).json_value()
    page.wait_for_timeout(_QUIET_MS)
    return float(end) - begin


def _wait(page: Page, condition: str) -> float:
    return float(page.wait_for_function(condition, polling="raf").json_value())


def _count(socket: WebSocket, received: list[int]) -> None:
    def add(payload: bytes | str) -> None:
        received[0] += len(payload)

    socket.on("framereceived", add)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
