"""Measure time and memory of reading a run of a thousand ranks, in fresh processes.

The run is synthetic (`large_run`). Smaller runs are its first ranks, with the same files.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.store.reader import open_run
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.large_run import Shape, write_large_run, write_part
from tests.studies.benchmarks.pairs import quantile

NUM_CPUS = 2
AIMED_RANKS = 1000
"""The number of ranks with an aim of the project."""
SHARES = (8, 4, 2, 1)
"""The measured parts of the run: an eighth of its ranks, a quarter, a half, all."""

_COMMAND = """
import atexit, os, re, runpy, sys, time
from pathlib import Path
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cpus}])
def tell():
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
    read = re.search(r"rchar: (\\d+)", Path("/proc/self/io").read_text())[1]
    print("cost", time.process_time_ns(), peak, read, file=sys.stderr)
atexit.register(tell)
sys.argv = ["fsdp-inspect", *{arguments!r}]
runpy.run_module("fsdp_inspect", run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run of a command."""

    wall_ns: int
    cpu_ns: int
    """User and system time of all threads, which other work on the machine hardly changes."""
    peak_bytes: int
    """The peak of resident memory, as the kernel counts it for the process (VmHWM)."""
    read_bytes: int
    """Bytes that the process read, also from sockets (rchar)."""


def measure_scale(
    folder: Path, *, ranks: int, steps: int = 100, units: int = 64, repeats: int = 5
) -> list[Figure]:
    """Time and memory of `summary`, and the time of one rank's one step, by number of ranks.

    Args:
        folder: The folder for the runs; about 1.2 MB for each rank of 100 steps and 64 units.
        ranks: Ranks of the largest run.
        steps: Steps of each rank.
        units: Units of the model.
        repeats: Fresh processes for each number of ranks.
    """
    whole = write_large_run(folder / "all", Shape(ranks, steps, units))
    sizes = sorted({max(ranks // share, 1) for share in SHARES})
    runs = {size: whole for size in sizes if size == ranks}
    for size in sizes[:-1]:
        runs[size] = write_part(whole, folder / f"first-{size}", Shape(size, steps, units))
    costs: dict[int, list[Cost]] = {size: [] for size in sizes}
    _summarise(runs[sizes[0]])  # compiles the imported modules
    for _ in range(repeats):  # alternating, so that a slow moment does not affect one size only
        for size in sizes:
            costs[size].append(_summarise(runs[size]))
    shape = f"{steps} steps x {units} units"
    return [
        *(_cost_figure(size, shape, costs[size]) for size in sizes),
        _growth_figure(sizes, costs),
        _events_figure(whole, Shape(ranks, steps, units)),
        Figure(
            name=f"size of the run folder, {ranks:,} ranks",
            value=format_bytes(_size(whole)),
            how="Measured: the made-up run, compacted: events, memory samples, summaries.",
            numbers={"bytes": _size(whole)},
        ),
    ]


def _cost_figure(ranks: int, shape: str, costs: Sequence[Cost]) -> Figure:
    wall_ns = statistics.median(cost.wall_ns for cost in costs)
    cpu_ns = statistics.median(cost.cpu_ns for cost in costs)
    peak_bytes = max(cost.peak_bytes for cost in costs)
    return Figure(
        name=f"fsdp-inspect show, {ranks:,} ranks x {shape}",
        value=f"{format_ns(wall_ns)} ({format_ns(cpu_ns)}), {format_bytes(peak_bytes)}",
        aim="< 3 s, < 1 GB" if ranks == AIMED_RANKS else "",
        how=(
            f"Measured: wall time (CPU time in brackets; medians of {len(costs)}) and highest "
            f"resident memory of fresh processes on {NUM_CPUS} CPUs, warm file cache, on a made-up "
            "run with events, memory samples and a summary for every rank."
        ),
        numbers={
            "ranks": ranks,
            "wall_ns": wall_ns,
            "cpu_ns": cpu_ns,
            "peak_bytes": peak_bytes,
        },
    )


def _growth_figure(sizes: Sequence[int], costs: dict[int, list[Cost]]) -> Figure:
    """The cost of one more rank, in the lower and in the upper half of the sizes."""
    cpu_ns = {size: statistics.median(cost.cpu_ns for cost in costs[size]) for size in sizes}
    half = sizes[len(sizes) // 2]
    lower = (cpu_ns[half] - cpu_ns[sizes[0]]) / max(half - sizes[0], 1)
    upper = (cpu_ns[sizes[-1]] - cpu_ns[half]) / max(sizes[-1] - half, 1)
    return Figure(
        name=f"one more rank, {sizes[0]:,} to {half:,} and {half:,} to {sizes[-1]:,} ranks",
        value=f"{format_ns(lower)}, {format_ns(upper)}",
        aim="the same",
        how="Derived from the rows above: slopes of the CPU time.",
        numbers={"lower_ns_per_rank": lower, "upper_ns_per_rank": upper},
    )


def _events_figure(run: Path, shape: Shape) -> Figure:
    times = list(_event_times(run, shape))
    return Figure(
        name=f"one rank's one step of {shape.num_ranks:,} ranks",
        value=f"{format_ns(statistics.median(times))} ({format_ns(quantile(times, 0.9))})",
        aim="< 100 ms",
        how=(
            f"Measured: median (p90 in brackets) of {len(times)} openings of the run followed by "
            "the events of another rank's middle step, in one process, warm file cache."
        ),
        numbers={"median_ns": statistics.median(times), "p90_ns": quantile(times, 0.9)},
    )


def _event_times(run: Path, shape: Shape) -> Iterator[int]:
    for rank in range(min(shape.num_ranks, 50)):
        began = time.perf_counter_ns()
        events = open_run(run).events(rank, steps=[shape.num_steps // 2])
        yield time.perf_counter_ns() - began
        if len(events) < shape.num_units:
            raise RuntimeError(f"Rank {rank} has {len(events)} events in a step. Expected more.")


def _summarise(run: Path) -> Cost:
    return run_command(["summary", str(run)], run.parent)[0]


def run_command(arguments: Sequence[str], folder: Path) -> tuple[Cost, str]:
    """Run `fsdp-inspect` in a fresh process; returns its cost and its output.

    Args:
        arguments: The arguments of the command.
        folder: The folder for the compiled modules.
    """
    script = _COMMAND.format(cpus=NUM_CPUS, arguments=list(arguments))
    began = time.perf_counter_ns()
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env=_environment(folder),
    )
    wall_ns = time.perf_counter_ns() - began
    told = re.search(r"^cost (\d+) (\d+) (\d+)$", done.stderr, re.MULTILINE)
    if told is None:
        raise RuntimeError(f"The command did not tell its cost: {done.stderr[-500:]!r}.")
    return Cost(wall_ns, int(told[1]), int(told[2]) << 10, int(told[3])), done.stdout


def _environment(folder: Path) -> dict[str, str]:
    """The environment of an installed package: its bytecode is stored, here next to the runs."""
    kept = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
