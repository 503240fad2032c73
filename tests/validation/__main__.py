"""How far are predictions from what then happens? `make validate`, or `python -m tests.validation`.

From one recorded baseline for each link and shape, the step time and peak memory of other plans are
predicted; then each plan is run for real under emulation, with a run of the baseline right before
it. How far that run is from the recorded baseline is the machine's own error (A/A), shown beside
the error of the prediction: noise moves both. Compute lasts a fixed time, so that the schedule's
error is seen apart from the machine's. Prints a table and a verdict; exits with 1 where a figure is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fsdp_inspect import open_run
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.simulation.recorded import RecordedWork, measure_work, observed_plan
from fsdp_inspect.simulation.simulate import simulate
from fsdp_inspect.store.folder import list_runs
from tests.validation.grid import Trial, make_grid

MEDIAN_STEP_ERROR, HIGH_STEP_ERROR, REPLAY_ERROR, MEDIAN_MEMORY_ERROR = 0.033, 0.08, 0.01, 0.02
"""What is wanted: at the median and the ninetieth percentile, of the recorded plan, of memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One plan: predicted, measured."""

    name: str
    measured_ns: int
    predicted_ns: int
    step_error: float
    """predicted / measured - 1."""
    same_error: float
    """A/A: the baseline beside it / the recorded baseline - 1."""
    replay_error: float
    measured_peak: int | None
    memory_error: float | None


class Bench:
    """Runs the trainer under emulation and keeps the baselines."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._baselines: dict[Trial, Path] = {}
        self._number = 0

    def judge(self, trial: Trial) -> Outcome:
        """Predict a trial from its baseline, then run both."""
        if trial.baseline not in self._baselines:
            self._baselines[trial.baseline] = self._run(trial.baseline)
        recorded = open_run(self._baselines[trial.baseline])
        beside = measure_work(open_run(self._run(trial.baseline)))
        actual_run = open_run(self._run(trial))
        actual = measure_work(actual_run)
        simulation = simulate(recorded, observed_plan(actual_run))
        predicted = simulation.predicted
        return Outcome(
            name=trial.name,
            measured_ns=actual.step_time_ns,
            predicted_ns=predicted.step_time_ns,
            step_error=predicted.step_time_ns / actual.step_time_ns - 1,
            same_error=beside.step_time_ns / simulation.recorded_step_ns - 1,
            replay_error=simulation.replay_error,
            measured_peak=actual.peak_bytes,
            memory_error=_memory_error(predicted.peak_bytes, actual),
        )

    def _run(self, trial: Trial) -> Path:
        self._number += 1
        folder = self._folder / f"{self._number:03d}"
        command = [sys.executable, "-m", "instrumented_trainer", "--preset", "tiny"]
        command += ["--steps", str(self._steps), "--runs-dir", str(folder), *trial.options()]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{trial.name} did not run: {done.stderr[-2000:]}")
        return list_runs(folder)[0].path


def _memory_error(predicted: int | None, actual: RecordedWork) -> float | None:
    return predicted / actual.peak_bytes - 1 if predicted and actual.peak_bytes else None


def main() -> int:
    """Run the grid; returns the exit code."""
    options = _parse()
    console = Console()
    trials = make_grid(options.trials)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.steps)
        for number, trial in enumerate(trials, start=1):
            outcomes.append(bench.judge(trial))
            print(f"{number}/{len(trials)} {trial.name}", file=sys.stderr, flush=True)
    console.print(_table(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=2))
    missed = _missed(outcomes)
    console.print(_verdict(outcomes, missed))
    return 1 if missed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make validate ARGS=...", description=__doc__)
    parser.add_argument(
        "--trials", type=int, default=42, help="of the grid's 144 (default 42, some 20 minutes)"
    )
    parser.add_argument("--steps", type=int, default=24, help="steps of a run (default 24)")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    return parser.parse_args()


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("plan", overflow="fold")
    for name in ("measured", "predicted", "error", "A/A", "peak", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in sorted(outcomes, key=lambda outcome: -abs(outcome.step_error)):
        table.add_row(
            each.name,
            format_ns(each.measured_ns),
            format_ns(each.predicted_ns),
            f"{each.step_error:+.1%}",
            f"{each.same_error:+.1%}",
            format_bytes(each.measured_peak),
            "" if each.memory_error is None else f"{each.memory_error:+.2%}",
        )
    return table


def _figures(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    """Name to measured and wanted."""
    steps = np.abs([each.step_error for each in outcomes])
    memory = np.abs([e.memory_error for e in outcomes if e.memory_error is not None])
    return {
        "step time, median error": (float(np.median(steps)), MEDIAN_STEP_ERROR),
        "step time, 90th percentile": (float(np.percentile(steps, 90)), HIGH_STEP_ERROR),
        "recorded plan, worst": (
            max(abs(each.replay_error) for each in outcomes),
            REPLAY_ERROR,
        ),
        "peak memory, median error": (float(np.median(memory)), MEDIAN_MEMORY_ERROR),
        "A/A, median": (float(np.median(np.abs([e.same_error for e in outcomes]))), float("inf")),
    }


def _missed(outcomes: Sequence[Outcome]) -> list[str]:
    return [name for name, (found, wanted) in _figures(outcomes).items() if found > wanted]


def _verdict(outcomes: Sequence[Outcome], missed: Sequence[str]) -> str:
    figures = "; ".join(
        f"{name} {found:.2%}" + (f" (wanted {wanted:.1%})" if np.isfinite(wanted) else "")
        for name, (found, wanted) in _figures(outcomes).items()
    )
    word = f"MISSED: {', '.join(missed)}." if missed else "All figures hold."
    return f"{len(outcomes)} plans. {figures}. {word}"


if __name__ == "__main__":
    sys.exit(main())
