"""Measure the import of traces in one process, and with one and two Dask workers, in turn.

The traces are copies of a few generated ones under the names of other ranks. Each mode must write
the same files. A worker's peak memory must not grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.formatting import format_bytes, format_ns
from tests.importing.kineto_traces import TraceWriter
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.imports import write_large_trace

NUM_MADE = 4
FEW_RANKS = 8
"""The ranks of the import whose memory is compared with that of the import of all ranks."""
MODES = {
    "without Dask": (),
    "--dask local:1": ("--dask", "local:1"),
    "--dask local:2": ("--dask", "local:2"),
}
_LOOK_EVERY_S = 0.05
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


@dataclass(frozen=True, slots=True)
class ImportCost:
    """The cost of one import."""

    wall_ns: int
    cpu_ns: int
    """User and system time of the command and its workers."""
    command_bytes: int
    """Peak resident memory of the command's own process."""
    worker_bytes: int
    """Highest peak resident memory of its child processes; 0: it has none."""
    digest: str
    """A hash of all files of the run."""


def measure_dask_import(
    folder: Path, *, ranks: int, events_per_trace: int, rounds: int
) -> list[Figure]:
    """Measure time and memory of the import of a folder of traces in each mode.

    Args:
        folder: The folder for the traces and the runs; made if missing.
        ranks: The number of traces.
        events_per_trace: The lowest number of events of a trace.
        rounds: The number of imports of each mode, in turn.

    Raises:
        RuntimeError: An import fails, or its run differs from that of another mode.
    """
    made = [
        _write_trace(folder / "made", number, ranks, events_per_trace) for number in range(NUM_MADE)
    ]
    all_traces = _link_traces(folder / "traces", made, ranks)
    few_traces = _link_traces(folder / "few" / "traces", made, FEW_RANKS)
    costs: dict[str, list[ImportCost]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in list(MODES)[:: -1 if number % 2 else 1]:
            costs[mode].append(import_once(all_traces, folder / "out", MODES[mode]))
    if len({cost.digest for each in costs.values() for cost in each}) != 1:
        raise RuntimeError("The imports wrote different files. Expected the same in each mode.")
    few = import_once(few_traces, folder / "out", MODES["--dask local:2"])
    size = format_bytes(made[0].stat().st_size)
    how = (
        f"Measured: medians of {rounds} imports of each mode, in turn, in fresh processes with "
        f"their start: {ranks} generated CUDA traces of {events_per_trace:,} events ({size}), "
        f"links to {NUM_MADE} files in the page cache. CPU time is that of the command and its "
        "workers. Memory is the highest resident memory. All modes wrote the same bytes."
    )
    return [
        *(_cost_figure(f"import of {ranks} traces, {mode}", costs[mode], how) for mode in MODES),
        _ratio("wall time: without Dask / local:1", costs, "without Dask", "--dask local:1", how),
        _ratio("wall time: without Dask / local:2", costs, "without Dask", "--dask local:2", how),
        _ratio("wall time: local:1 / local:2", costs, "--dask local:1", "--dask local:2", how),
        _cost_figure(f"import of {FEW_RANKS} traces, --dask local:2", [few], how),
        _growth_figure(few, costs["--dask local:2"], ranks),
    ]


def import_once(traces: Path, folder: Path, options: Sequence[str]) -> ImportCost:
    """Import traces in a fresh process, and remove the run.

    Raises:
        RuntimeError: The import fails.
    """
    folder.mkdir()
    run = folder / "run"
    command = ("import", str(traces), "--out", str(run), "--json", *options)
    began = time.perf_counter_ns()
    importing = subprocess.Popen(
        [sys.executable, "-m", "fsdp_inspect", *command], stdout=subprocess.DEVNULL
    )
    peaks = _follow(importing.pid)
    _, status, usage = os.wait4(importing.pid, 0)
    importing.returncode = os.waitstatus_to_exitcode(status)
    wall_ns = time.perf_counter_ns() - began
    if importing.returncode != 0:
        raise RuntimeError(f"The import ended with exit code {importing.returncode}.")
    digest = _digest(run)
    shutil.rmtree(folder)
    workers = [peak for process, peak in peaks.items() if process != importing.pid]
    return ImportCost(
        wall_ns=wall_ns,
        cpu_ns=round(1e9 * (usage.ru_utime + usage.ru_stime)),
        command_bytes=peaks[importing.pid],
        worker_bytes=max(workers, default=0),
        digest=digest,
    )


def _follow(command: int) -> dict[int, int]:
    """Read the peak memory of a process and its children until the process ends.

    A worker ends after its last task, so its last reading includes its peak.
    """
    peaks: dict[int, int] = {}
    while os.waitid(os.P_PID, command, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        for process in (command, *_children(command)):
            with contextlib.suppress(OSError):
                found = _PEAK.search(Path(f"/proc/{process}/status").read_text())
                if found is not None:
                    peaks[process] = int(found[1]) << 10
        time.sleep(_LOOK_EVERY_S)
    return peaks


def _children(process: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


def _write_trace(folder: Path, number: int, ranks: int, num_events: int) -> Path:
    """Write a trace that names no rank, so the name of a link decides its rank."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = TraceWriter(world_size=ranks)
    del trace.beside["distributedInfo"]["rank"]
    trace.beside["baseTimeNanoseconds"] += 1000 * number
    return write_large_trace(folder / f"{number}.json", num_events, trace)[0]


def _link_traces(folder: Path, made: Sequence[Path], ranks: int) -> Path:
    folder.mkdir(parents=True)
    for rank in range(ranks):
        (folder / f"rank{rank}.json").hardlink_to(made[rank % len(made)])
    return folder


def _digest(run: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(run)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _median(costs: Sequence[ImportCost], read: Callable[[ImportCost], int]) -> float:
    return statistics.median(read(cost) for cost in costs)


def _cost_figure(name: str, costs: Sequence[ImportCost], how: str) -> Figure:
    wall_ns, cpu_ns = _median(costs, lambda c: c.wall_ns), _median(costs, lambda c: c.cpu_ns)
    command_bytes = max(cost.command_bytes for cost in costs)
    worker_bytes = max(cost.worker_bytes for cost in costs)
    of_worker = f", {format_bytes(worker_bytes)} a worker" if worker_bytes else ""
    return Figure(
        name=name,
        value=f"{format_ns(wall_ns)} ({format_ns(cpu_ns)}), {format_bytes(command_bytes)}"
        f"{of_worker}",
        how=how,
        numbers={
            "wall_ns": wall_ns,
            "cpu_ns": cpu_ns,
            "command_bytes": command_bytes,
            "worker_bytes": worker_bytes,
        },
    )


def _ratio(
    name: str, costs: dict[str, list[ImportCost]], above: str, below: str, how: str
) -> Figure:
    """The median of the ratios of wall times of the rounds."""
    ratios = [
        one.wall_ns / other.wall_ns for one, other in zip(costs[above], costs[below], strict=True)
    ]
    times = statistics.median(ratios)
    return Figure(
        name=name,
        value=f"{times:.2f} x",
        interval=f"{min(ratios):.2f} to {max(ratios):.2f} x (range)",
        how=how,
        numbers={"times": times, "times_low": min(ratios), "times_high": max(ratios)},
    )


def _growth_figure(few: ImportCost, many: Sequence[ImportCost], ranks: int) -> Figure:
    times = max(cost.worker_bytes for cost in many) / few.worker_bytes
    return Figure(
        name=f"peak memory of a worker: {ranks} traces / {FEW_RANKS} traces, --dask local:2",
        value=f"{times:.2f} x",
        aim="1 x",
        how="Derived from the rows above. A task reads one trace, or writes one rank.",
        numbers={"times": times},
    )
