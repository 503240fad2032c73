"""Measure start times of imports and commands, repeatedly in fresh interpreters."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_inspect.formatting import format_ns
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.pairs import quantile

_TIMED_IMPORT = """
import json, sys, time
start = time.perf_counter_ns()
import {module}
spent = time.perf_counter_ns() - start
print(json.dumps([spent, "torch" in sys.modules, "streamlit" in sys.modules]))
"""
_PEER = "numpy"
"""A package with a well-known import time."""


def measure_startup(run: Path, *, repeats: int) -> list[Figure]:
    """Import time, the interpreter's own start, and the summary of a recorded run."""
    imports: list[int] = []
    peer: list[int] = []
    floor: list[int] = []
    summary: list[int] = []
    for _ in range(repeats):  # alternating, so that a slow moment does not affect one command only
        imports.append(_import_ns("fsdp_inspect", is_pure=True))
        peer.append(_import_ns(_PEER))
        floor.append(_wall_ns([sys.executable, "-c", "import json"]))
        summary.append(
            _wall_ns([sys.executable, "-m", "fsdp_inspect", "show", str(run), "summary"])
        )
    fresh = f"Measured: median (p90 in brackets) of {repeats} fresh interpreters, warm file cache"
    return [
        _figure(
            "import fsdp_inspect",
            imports,
            aim="< 100 ms",
            how=f"{fresh}; around the import statement. Neither torch nor streamlit is loaded.",
        ),
        _figure(f"import {_PEER}, for comparison", peer, how=f"{fresh}; likewise."),
        _figure("python -c 'import json'", floor, how=f"{fresh}; wall time of the whole process."),
        _figure(
            "fsdp-inspect show",
            summary,
            aim="< 1 s",
            how=(
                f"{fresh}; wall time of the whole process, of `python -m fsdp_inspect summary` on "
                f"the run {run.name}."
            ),
        ),
    ]


def _figure(name: str, times_ns: list[int], *, how: str, aim: str = "") -> Figure:
    median, p90 = statistics.median(times_ns), quantile(times_ns, 0.9)
    return Figure(
        name=name,
        value=f"{format_ns(median)} ({format_ns(p90)})",
        aim=aim,
        how=how,
        numbers={"median_ns": median, "p90_ns": p90},
    )


def _import_ns(module: str, *, is_pure: bool = False) -> int:
    script = _TIMED_IMPORT.format(module=module)
    spent, has_torch, has_streamlit = json.loads(_run([sys.executable, "-c", script]))
    if is_pure and (has_torch or has_streamlit):
        raise RuntimeError(f"Importing {module} loaded torch or streamlit. Expected neither.")
    return int(spent)


def _wall_ns(command: list[str]) -> int:
    return _timed(lambda: _run(command))


def _timed(action: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - start


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
