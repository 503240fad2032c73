"""Measure the size of a recording and of a profiler trace: bytes per rank and step.

Both are measured at two lengths. The growth between them is the cost of a step; the rest is fixed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from fsdp_inspect import Recorder
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import EVENTS
from instrumented_trainer.runtime import Runtime
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.profiler_trace import export_trace, gzipped_bytes
from tests.studies.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.studies.benchmarks.workload import Workload

_WARMUP_STEPS = 3


def measure_sizes(folder: Path, *, short: int, long: int) -> list[Figure]:
    """Measure the bytes of a rank's compacted recording, and of the gzipped trace of equal steps.

    Args:
        folder: The folder for the recordings; made if missing.
        short: Steps of the shorter run.
        long: Steps of the longer run.
    """
    answers = run_ranks(__name__, {"lengths": [short, long]}, folder)
    recorded = {steps: _rank_bytes(folder / f"run-{steps}") for steps in (short, long)}
    events = {steps: _events_bytes(folder / f"run-{steps}") for steps in (short, long)}
    traced = {
        steps: sum(answer[str(steps)] for answer in answers) / NUM_RANKS for steps in (short, long)
    }
    run = open_run(folder / f"run-{long}")
    span = long - short
    per_step = (recorded[long] - recorded[short]) / span
    traced_per_step = (traced[long] - traced[short]) / span
    fixed = recorded[short] - per_step * short
    how = (
        f"Measured: growth between runs of {short} and {long} steps after compaction, the whole "
        f"run folder over its {NUM_RANKS} gloo ranks; trainer preset tiny with 8 blocks, "
        f"{len(run.events(0)) / run.ranks[0].num_steps:.0f} events a step, each in detail."
    )
    return [
        Figure(
            name="recording, per rank and step",
            value=format_bytes(per_step),
            how=how,
            numbers={
                "bytes_per_rank_and_step": per_step,
                "events_bytes_per_rank_and_step": (events[long] - events[short]) / span,
            },
        ),
        Figure(
            name="recording, fixed part per rank",
            value=format_bytes(fixed),
            how=how,
            numbers={"fixed_bytes_per_rank": fixed},
        ),
        Figure(
            name="torch.profiler trace, per rank and step",
            value=format_bytes(traced_per_step),
            how=(
                f"Measured: growth between gzipped chrome traces of {short} and {long} steps of "
                "the same model (CPU activities, no shapes), mean of the ranks."
            ),
            numbers={"trace_bytes_per_rank_and_step": traced_per_step},
        ),
        Figure(
            name="trace over recording, per step",
            value=f"{traced_per_step / per_step:.0f} x",
            aim=">= 100 x",
            how="Derived from the two rows above.",
            numbers={"times": traced_per_step / per_step},
        ),
        Figure(
            name=f"trace over recording, {long} steps as a whole",
            value=f"{traced[long] / recorded[long]:.0f} x",
            aim=">= 100 x",
            how=(
                f"Derived: a rank's gzipped trace of {long} steps over its share of the run "
                "folder, fixed part included."
            ),
            numbers={
                "times": traced[long] / recorded[long],
                "trace_bytes": traced[long],
                "recording_bytes": recorded[long],
            },
        ),
    ]


def record_run(folder: Path, *, steps: int) -> Path:
    """Record a run with this number of steps and without a trace, for other benchmarks."""
    run_ranks(__name__, {"lengths": [steps], "trace": False}, folder)
    return folder / f"run-{steps}"


def _rank_bytes(run: Path) -> float:
    """The bytes of a compacted run folder per rank."""
    compact_run(run)
    return sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / NUM_RANKS


def _events_bytes(run: Path) -> float:
    tables = [rank_folder(run, 0, rank) / EVENTS.compacted_name for rank in range(NUM_RANKS)]
    return sum(table.stat().st_size for table in tables) / NUM_RANKS


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Record, then profile; returns the gzipped size of the rank's trace by the number of steps."""
    workload = Workload.build(runtime)
    sizes = {}
    for steps in options["lengths"]:
        _record(workload, folder / f"run-{steps}", steps)
        if options.get("trace", True):
            trace = folder / f"trace-{steps}-{runtime.rank}.json"
            sizes[str(steps)] = _traced_bytes(workload, trace, steps)
    return sizes


def _record(workload: Workload, path: Path, steps: int) -> None:
    model, optimizer = workload.model, workload.optimizer
    with Recorder(
        model, optimizer=optimizer, path=path, overhead=None, print_verdict=False
    ) as recorder:
        loop = workload.loop(recorder)
        for step in range(steps):
            loop.run_step(step)


def _traced_bytes(workload: Workload, path: Path, steps: int) -> int:
    loop = workload.loop()
    for step in range(_WARMUP_STEPS):
        loop.run_step(step)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(steps):
            loop.run_step(step)
    export_trace(profiler, path)
    size = gzipped_bytes(path)
    path.unlink()
    return size


if __name__ == "__main__":
    on_each_rank(_measure_rank)
