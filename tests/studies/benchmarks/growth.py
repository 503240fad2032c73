"""Measure `summary` and the first page of a run of 4,096 ranks x 1,000 steps x 100 units.

The runs are synthetic (`large_run`): a few ranks are made, and the others link their tables. The
growth with ranks, steps and units is measured separately. The S3 server is `s3_folder`, which
serves the files of the disk with a delay of 20 ms before each answer.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from fsdp_inspect.formatting import format_bytes, format_ns
from tests.browser.conftest import serve
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.large_run import Shape, write_repeated_run
from tests.studies.benchmarks.s3_folder import BUCKET
from tests.studies.benchmarks.scale import Cost, run_command
from tests.studies.benchmarks.visits import browse, visit_page

LARGEST = Shape(4096, 1000, 100)
_SMALL = Shape(256, 100, 16)
GROWTH = {
    "ranks": [replace(_SMALL, num_ranks=number) for number in (1024, 2048, 4096)],
    "steps": [replace(_SMALL, num_steps=number) for number in (250, 500, 1000)],
    "units": [replace(_SMALL, num_units=number) for number in (25, 50, 100)],
}
"""The shapes of each direction, of which only one number grows."""
LATENCY_S = 0.02
_DISTINCT = 4
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def measure_growth(folder: Path, *, largest: Shape = LARGEST, repeats: int = 3) -> list[Figure]:
    """Measure the largest run on the disk and in S3, and the growth in each direction.

    Args:
        folder: The folder for the runs; about 1 GB.
        largest: The size of the largest run.
        repeats: Fresh processes for each number.
    """
    runs = folder / "runs"
    run = write_repeated_run(runs / "largest", largest, distinct=_DISTINCT)
    figures = [_summary_figure(largest, [_summarise(str(run), folder) for _ in range(repeats)])]
    figures.append(_page_figure(largest, _first_pages(str(runs), folder, repeats), "the disk", 3))
    with serve_folder(runs) as variables, patch.dict(os.environ, variables):
        url = f"s3://{BUCKET}/largest"
        costs = [_summarise_anew(url, folder) for _ in range(repeats)]
        figures.append(_summary_figure(largest, costs, "S3, 20 ms"))
        pages = _first_pages(f"s3://{BUCKET}", folder, repeats)
        figures.append(_page_figure(largest, pages, "S3, 20 ms", 6))
    for direction, shapes in GROWTH.items():
        figures += _growth_figures(folder, direction, shapes, repeats)
    return figures


@contextmanager
def serve_folder(folder: Path) -> Iterator[Mapping[str, str]]:
    """Serve a folder as S3; the value is the environment of its clients."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "tests.studies.benchmarks.s3_folder", str(folder), str(port)]
    server = subprocess.Popen([*command, str(LATENCY_S)])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            if server.poll() is not None:
                raise RuntimeError("The S3 server ended before it answered.")
            time.sleep(0.1)
        yield {**_CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait()


def _summarise(run: str, folder: Path) -> Cost:
    return run_command(["summary", run], folder)[0]


def _summarise_anew(run: str, folder: Path) -> Cost:
    """Summarise a run whose objects no cache has."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as cache,
        patch.dict(os.environ, {"XDG_CACHE_HOME": cache}),
    ):
        return _summarise(run, folder)


def _first_pages(runs: str, folder: Path, repeats: int) -> list[float]:
    """Times in seconds of the first visit to Overview, each of a server that just started.

    The first visit of the browser is not counted, because it loads the dashboard's scripts. They
    belong to the port, so the port stays the same.
    """
    seconds = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with browse() as context:
        for _ in range(1 + repeats):
            with (
                tempfile.TemporaryDirectory(dir=folder) as cache,
                patch.dict(os.environ, {"XDG_CACHE_HOME": cache}),
                serve(runs, port, folder / "server.log") as address,
                visit_page(context, f"{address}/overview?run=largest") as tab,
            ):
                seconds.append(tab.visit.interactive_ms / 1e3)
    return seconds[1:]


def _name(shape: Shape) -> str:
    return f"{shape.num_ranks:,} ranks x {shape.num_steps:,} steps x {shape.num_units} units"


def _summary_figure(shape: Shape, costs: Sequence[Cost], place: str = "the disk") -> Figure:
    wall_ns, cpu_ns = (
        statistics.median(getattr(cost, name) for cost in costs) for name in ("wall_ns", "cpu_ns")
    )
    peak, read = (max(getattr(cost, name) for cost in costs) for name in _BYTES)
    return Figure(
        name=f"fsdp-inspect show from {place}, {_name(shape)}",
        value=f"{format_ns(wall_ns)} ({format_ns(cpu_ns)}), {format_bytes(peak)}, "
        f"{format_bytes(read)} read",
        aim="< 5 s, < 1 GB" if shape == LARGEST and place == "the disk" else "",
        how=(
            f"Measured: wall time (CPU time in brackets; medians of {len(costs)}), highest "
            "resident memory, and bytes read from files, imported modules included. Fresh "
            "processes on 2 CPUs, warm file cache; S3 without a cache."
        ),
        numbers={"wall_ns": wall_ns, "cpu_ns": cpu_ns, "peak_bytes": peak, "read_bytes": read},
    )


_BYTES = ("peak_bytes", "read_bytes")


def _page_figure(shape: Shape, seconds: Sequence[float], place: str, aim_s: int) -> Figure:
    middle = statistics.median(seconds)
    return Figure(
        name=f"first page from {place}, {_name(shape)}",
        value=f"{middle:.2f} s",
        aim=f"< {aim_s} s" if shape == LARGEST else "",
        how=(
            f"Measured in Chromium next to the server: median of {len(seconds)} first visits to "
            "Overview of a server that just started, until everything is drawn."
        ),
        numbers={"seconds": middle},
    )


def _growth_figures(
    folder: Path, direction: str, shapes: Sequence[Shape], repeats: int
) -> Iterator[Figure]:
    """The cost of each shape, alternating so that a slow moment does not affect one only."""
    runs = {
        shape: write_repeated_run(folder / f"{direction}-{at}", shape, distinct=_DISTINCT)
        for at, shape in enumerate(shapes)
    }
    costs: dict[Shape, list[Cost]] = {shape: [] for shape in shapes}
    for _ in range(repeats):
        for shape, run in runs.items():
            costs[shape].append(_summarise(str(run), folder))
    for shape in shapes:
        yield _summary_figure(shape, costs[shape])
