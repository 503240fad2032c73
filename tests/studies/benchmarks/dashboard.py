"""Measure the times of each page of the dashboard, and the data that it sends.

Chromium opens pages of the real server on this machine: every page of a recorded sample, the pages
of a synthetic run of 1,024 ranks, and the timeline of one step with very many intervals.

- Warm: the server has shown the page before.
- Cold: the server was just started.
- From the list: the server has shown the list of runs, and nothing of this run.

Static files are in the browser's cache in all cases.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from fsdp_inspect_app.pages import SECTIONS, PageFile
from playwright.sync_api import BrowserContext, TimeoutError as TooSlowError

from fsdp_inspect.formatting import format_bytes, format_ns
from tests.browser.conftest import serve
from tests.studies.benchmarks.crowded_step import NUM_RANKS, write_crowded_run
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.large_run import Shape, write_part, write_repeated_run
from tests.studies.benchmarks.visits import LONGEST_MS, REST_MS, Visit, Zoom, browse, visit_page

SAMPLES = Path(__file__).parents[3] / "samples"
_RECORDED = ("tiny-2-ranks", "async-prefetch-2-ranks")
"""Samples of one model under two plans."""
_LARGE = ("many-ranks", "many-ranks-again")
_DISTINCT_RANKS = 32
"""The number of generated ranks; the others repeat them."""
_TIMELINE_AIM = "< 2 s after the boot, < 1 MB"
_ZOOM_AIM = "< 1 s, < 1 MB"
_INTERACTIVE = (
    "Measured in Chromium, from the navigation to the ninth frame in a row that is shorter than "
    "60 ms, with everything drawn and nothing on its way, after which nothing arrives for "
    f"{REST_MS} ms; `first line` is the page's headline, `boot` Streamlit's own start until its "
    "websocket is open; `CPU` is the CPU time of the tab's main thread; bytes are those that "
    "arrived over the websocket; `frame` is the longest since the headline."
)


@dataclass(frozen=True, slots=True)
class Scale:
    """The extent of the measurement."""

    ranks: int = 1024
    steps: int = 100
    units: int = 16
    intervals: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """The number of intervals in the single step of each timeline."""
    rounds: int = 3
    """The number of warm visits of each page."""
    has_cold: bool = True
    """Whether each page is also visited on a separate server."""


FULL = Scale()
QUICK = Scale(ranks=64, steps=20, units=8, intervals=(10_000,), rounds=1, has_cold=False)


@dataclass(slots=True)
class _Place:
    """A page of one or several runs, with the results of its visits."""

    name: str
    address: str
    """The address below the server's."""
    is_crowded: bool = False
    """Whether it is a timeline of very many intervals, which is zoomed."""
    warm: list[Visit | None] = field(default_factory=list)
    """The warm visits; None for a visit in which the page did not come to rest."""
    cold: list[Visit | None] = field(default_factory=list)
    opened: list[Visit | None] = field(default_factory=list)
    """The visits from the list of runs."""
    zooms: list[Zoom] = field(default_factory=list)
    """The zooms, one for each warm visit."""


def measure_dashboard(folder: Path, scale: Scale = FULL) -> list[Figure]:
    """Time to interactive, bytes and frames of every page, and the latency of a zoom.

    Args:
        folder: The folder for the runs; made if missing.
        scale: The extent of the measurement.

    Raises:
        RuntimeError: Chromium or a sample is missing, or a page shows an error.
    """
    runs = folder / "runs"
    _write_runs(runs, scale)
    places = [*_places_of_recorded(), *_places_of_large(scale), *_places_of_crowded(scale)]
    port, log = _free_port(), folder / "server.log"
    loads: list[float] = []
    with browse() as context:
        with serve(runs, port, log) as address:
            for number in range(1 + scale.rounds):  # alternating; the first round fills the caches
                for place in places:
                    _visit(context, address, place, into=place.warm if number else [])
                    loads.append(os.getloadavg()[0])
        # The browser's cache belongs to the port, so the port stays the same.
        for place in places if scale.has_cold else []:
            with serve(runs, port, log) as address:
                _visit(context, address, place, into=place.cold)
                loads.append(os.getloadavg()[0])
            for _ in range(scale.rounds if place.is_crowded else 0):
                with serve(runs, port, log) as address:
                    _visit(context, address, _LIST, into=[])
                    _visit(context, address, place, into=place.opened)
                    loads.append(os.getloadavg()[0])
    return [*(figure for place in places for figure in _figures(place)), _load_figure(loads)]


def _write_runs(folder: Path, scale: Scale) -> None:
    for name in _RECORDED:
        if not (SAMPLES / name).is_dir():
            raise RuntimeError(
                f"No sample {name!r} in {str(SAMPLES)!r}. `make samples` records it."
            )
        shutil.copytree(SAMPLES / name, folder / name)
    shape = Shape(scale.ranks, scale.steps, scale.units)
    whole = write_repeated_run(folder / _LARGE[0], shape, distinct=_DISTINCT_RANKS)
    write_part(whole, folder / _LARGE[1], shape)
    for size in scale.intervals:
        write_crowded_run(folder / f"intervals-{size}", size)


def _places_of_recorded() -> Iterator[_Place]:
    for pages in SECTIONS.values():
        for page in pages:
            yield _Place(f"{page.title}, recorded sample", _address(page, _RECORDED))


def _places_of_large(scale: Scale) -> Iterator[_Place]:
    compare = next(page for page in SECTIONS[""] if page.name == "compare")
    for page in (*SECTIONS["This run"], compare):
        yield _Place(
            f"{page.title}, {scale.ranks:,} ranks x {scale.steps} steps", _address(page, _LARGE)
        )


def _places_of_crowded(scale: Scale) -> Iterator[_Place]:
    for size in scale.intervals:
        run = {"run": f"intervals-{size}", "step": 0, "rank": range(NUM_RANKS)}
        query = urlencode(run, doseq=True)
        yield _Place(f"Timeline, {size:,} intervals", f"timeline?{query}", is_crowded=True)


def _address(page: PageFile, runs: tuple[str, str]) -> str:
    if page.name == "compare":
        return f"{page.address}?{urlencode({'baseline': runs[0], 'with': runs[1]})}"
    return f"{page.address}?{urlencode({'run': runs[0]})}"


_LIST = _Place("Runs, before a run is opened", "")


def _visit(
    context: BrowserContext, address: str, place: _Place, *, into: list[Visit | None]
) -> None:
    """Open a page, zoom it if it is a crowded timeline, and print its time on stderr."""
    visit = None
    try:
        with visit_page(context, f"{address}/{place.address}") as tab:
            visit = tab.visit
            zoom = tab.zoom() if place.is_crowded else None
    except TooSlowError:
        print(f"  {place.name}: no rest within {_ms(LONGEST_MS)}", file=sys.stderr, flush=True)
    else:
        print(f"  {place.name}: {_ms(visit.interactive_ms)}", file=sys.stderr, flush=True)
        if zoom is not None and into is place.warm:
            place.zooms.append(zoom)
    into.append(visit)


def _figures(place: _Place) -> Iterator[Figure]:
    aim = _TIMELINE_AIM if place.is_crowded else ""
    yield _visits_figure(place.name, place.warm, aim, "The server had shown the page before.")
    if place.cold:
        name = f"{place.name}, first visit"
        yield _visits_figure(name, place.cold, "", "The server was just started.")
    if place.opened:
        name = f"{place.name}, from the list"
        yield _visits_figure(name, place.opened, aim, "The server had shown the list of runs only.")
    if place.zooms:
        yield _zoom_figure(place)


def _visits_figure(name: str, tried: Sequence[Visit | None], aim: str, state: str) -> Figure:
    visits = [visit for visit in tried if visit is not None]
    if len(visits) < len(tried):
        restless = (
            f"Measured: {len(tried) - len(visits)} of {len(tried)} visits did not come to rest."
        )
        value = f"more than {_ms(LONGEST_MS)}"
        return Figure(name=name, value=value, aim=aim, how=f"{restless} {state}")
    interactive = [visit.interactive_ms for visit in visits]
    numbers = {
        "interactive_ms": statistics.median(interactive),
        "answered_ms": _median(visits, lambda visit: visit.answered_ms),
        "booted_ms": _median(visits, lambda visit: visit.booted_ms),
        "after_boot_ms": _median(visits, lambda visit: visit.interactive_ms - visit.booted_ms),
        "busy_ms": _median(visits, lambda visit: visit.busy_ms),
        "received_bytes": max(visit.received_bytes for visit in visits),
        "worst_frame_ms": max(visit.worst_frame_ms for visit in visits),
    }
    count = f"Medians of {len(visits)} visits" if len(visits) > 1 else "One visit"
    parts = (
        f"boot {_ms(numbers['booted_ms'])}, first line {_ms(numbers['answered_ms'])}; "
        f"CPU {_ms(numbers['busy_ms'])}"
    )
    received, frame = format_bytes(numbers["received_bytes"]), _ms(numbers["worst_frame_ms"])
    return Figure(
        name=name,
        value=f"{_ms(numbers['interactive_ms'])} ({parts}), {received}, frame {frame}",
        interval=_range(interactive),
        aim=aim,
        how=f"{_INTERACTIVE} {count}, the most bytes and the longest frame of them. {state}",
        numbers=numbers,
    )


def _zoom_figure(place: _Place) -> Figure:
    zooms = place.zooms
    complete = [zoom.complete_ms for zoom in zooms]
    numbers = {
        "complete_ms": statistics.median(complete),
        "drawn_ms": statistics.median(zoom.drawn_ms for zoom in zooms),
        "received_bytes": max(zoom.received_bytes for zoom in zooms),
        "worst_frame_ms": max(zoom.worst_frame_ms for zoom in zooms),
    }
    return Figure(
        name=f"{place.name}, zoom",
        value=(
            f"{_ms(numbers['complete_ms'])} (first redrawn {_ms(numbers['drawn_ms'])}), "
            f"{format_bytes(numbers['received_bytes'])}, frame {_ms(numbers['worst_frame_ms'])}"
        ),
        interval=_range(complete),
        aim=_ZOOM_AIM,
        how=(
            "Measured in Chromium, from the first of six quick turns of the wheel to the picture "
            f"of what the server sent for the new window; {NUM_RANKS} ranks. Medians of "
            f"{len(zooms)}, the most bytes and the longest frame of them."
        ),
        numbers=numbers,
    )


def _load_figure(loads: Sequence[float]) -> Figure:
    return Figure(
        name="load of the machine meanwhile",
        value=f"{statistics.median(loads):.1f} (highest {max(loads):.1f})",
        how=(
            "Measured: runnable processes over the minute before each visit, the browser and the "
            "server included; median. Above the number of CPUs, times are longer than they need be."
        ),
        numbers={"median": statistics.median(loads), "highest": max(loads)},
    )


def _median(visits: Sequence[Visit], number: Callable[[Visit], float]) -> float:
    return statistics.median(number(visit) for visit in visits)


def _range(times_ms: Sequence[float]) -> str:
    if len(times_ms) < 2:
        return ""
    return f"{_ms(min(times_ms))} to {_ms(max(times_ms))} (range)"


def _ms(milliseconds: float) -> str:
    return format_ns(milliseconds * 1e6)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
