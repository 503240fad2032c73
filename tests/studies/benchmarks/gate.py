"""Run many gate checks of one unchanged program against itself.

Each run of the program is a new pair of processes. Every check draws its baseline and its run from
this pool of runs. Checks share runs and are not independent, so the number of processes is stated
next to the number of checks. Memory checks compare one run with one. Time checks compare five runs
with five: drawn at random, and as in CI, five in a row with the five before.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_inspect.comparison.gate.baseline import make_baseline
from fsdp_inspect.comparison.gate.check import CheckOutcome, check_run
from fsdp_inspect.comparison.gate.measurements import GateMeasurements, read_runs
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.report.check import describe_outcome
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.ranks import NUM_RANKS

_STEPS = 30
_LEAST_RUNS = 2 * RUNS_FOR_A_TEST
Sides = tuple[Sequence[int], Sequence[int]]
"""Indices into the pool: those of the baseline's runs, and those of the checked runs."""


def measure_gate(folder: Path, *, runs: int, checks: int) -> list[Figure]:
    """Measure how often an unchanged program passes, fails and cannot be judged.

    Args:
        folder: The folder for the recordings; made if missing.
        runs: Runs to record, at least ten.
        checks: Checks of each kind.
    """
    began = time.monotonic()
    pool = [_record(folder / str(number)) for number in range(runs)]
    took_s = time.monotonic() - began
    draw = random.Random(0)
    kinds = {
        "memory, one run against one": ("no exit 1", _pairs(draw, runs, checks)),
        "times, 5 random runs against 5": ("at most one exit 1", _fives(draw, runs, checks)),
        "times, 5 in a row against 5 before": ("", _in_a_row(draw, runs, checks)),
    }
    how = (
        f"{runs} runs of the trainer ({NUM_RANKS} gloo ranks, {_STEPS} steps of `tiny`) one after "
        f"another, recorded in {took_s:.0f} s; the checks draw from these {runs}, and share them."
    )
    figures = []
    for name, (aim, sides) in kinds.items():
        is_of_times = name.startswith("times")
        codes = Counter(_exit_code(pool, one, is_of_times=is_of_times) for one in sides)
        figures.append(
            Figure(
                name=f"{checks} checks of an unchanged program: {name}; exit 0, 1, 2",
                value=", ".join(str(codes[code]) for code in (0, 1, 2)),
                aim=aim,
                how=how,
                numbers={f"exit_{code}": codes[code] for code in (0, 1, 2)} | {"runs": runs},
            )
        )
    return figures


def _record(folder: Path) -> GateMeasurements:
    """Run the program once in separate processes, and read its measurements."""
    launch = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}"]
    program = ["-m", "instrumented_trainer", "--steps", str(_STEPS), "--runs-dir", str(folder)]
    folder.mkdir(parents=True)
    done = subprocess.run(
        [*command, *launch, *program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"The trainer ended with {done.returncode}:\n{done.stderr[-4000:]}")
    (entry,) = list_runs(folder)
    return read_runs([open_run(entry.path)])


def _pairs(draw: random.Random, runs: int, checks: int) -> Iterator[Sides]:
    for _ in range(checks):
        before, after = draw.sample(range(runs), 2)
        yield [before], [after]


def _fives(draw: random.Random, runs: int, checks: int) -> Iterator[Sides]:
    for _ in range(checks):
        drawn = draw.sample(range(runs), _LEAST_RUNS)
        yield drawn[:RUNS_FOR_A_TEST], drawn[RUNS_FOR_A_TEST:]


def _in_a_row(draw: random.Random, runs: int, checks: int) -> Iterator[Sides]:
    for _ in range(checks):
        before = draw.randrange(runs - _LEAST_RUNS + 1)
        after = draw.randrange(before + RUNS_FOR_A_TEST, runs - RUNS_FOR_A_TEST + 1)
        yield range(before, before + RUNS_FOR_A_TEST), range(after, after + RUNS_FOR_A_TEST)


def _exit_code(pool: Sequence[GateMeasurements], sides: Sides, *, is_of_times: bool) -> int:
    """The exit code of one check; the metrics that rose are printed."""
    before, after = (_together([pool[place] for place in side]) for side in sides)
    if is_of_times:
        before, after = replace(before, memory={}), replace(after, memory={})
    result = check_run(after, make_baseline(before))
    for one in result.metrics:
        if one.outcome is CheckOutcome.REGRESSION:
            print(
                f"  {one.name} of runs {list(sides[1])} rose from {one.before} to {one.after} over "
                f"runs {list(sides[0])}: {describe_outcome(result)}",
                file=sys.stderr,
            )
    if result.exit_code == 2 and not is_of_times:
        print(
            f"  runs {list(sides[1])} over {list(sides[0])}: {describe_outcome(result)}",
            file=sys.stderr,
        )
    return result.exit_code


def _together(readings: Sequence[GateMeasurements]) -> GateMeasurements:
    """Join measurements of single runs to those of repeats, as `read_runs` of all runs does."""
    top = max(readings, key=lambda reading: reading.memory["peak_allocated_bytes"])
    times = {
        name: tuple(time for reading in readings for time in reading.times[name])
        for name in top.times
    }
    highest = {
        name: max(reading.memory.get(name, 0) for reading in readings) for name in top.memory
    }
    delays = tuple(delay for reading in readings for delay in reading.run_delays)
    return replace(top, times=times, memory=highest, run_delays=delays)
