"""Compare predictions with runs under emulation, from one recorded baseline for each shape.

A run of the baseline precedes each plan's run. Its difference from the recorded baseline is the
machine's own error (A/A), and noise affects both runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_inspect.simulation.changes import apply_changes
from fsdp_inspect.simulation.recorded import measure_work, observed_plan
from fsdp_inspect.simulation.scenario import resolve_plan, shapes_of
from fsdp_inspect.store.reader import StoredRun
from fsdp_inspect.trace.plan import Plan
from tests.studies.validation.grid import (
    BASELINE_LINK,
    LINKS,
    SHAPES,
    Trial,
    all_trials,
    baseline_of,
    changes_of,
    command_of,
    draw,
)
from tests.studies.validation.outcomes import Outcome, compare, only_run, predict, work_of

VIRTUAL_STEPS = 6
"""The steps of a run on virtual time, where steps are equal: three warm-up steps, one for
memory."""


class EmulationBench:
    """Runs the trainer under emulation, and keeps the baselines."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        say: Callable[[str], None],
        *,
        on_virtual_time: bool = False,
    ) -> None:
        """Prepare the bench; this runs nothing.

        Args:
            folder: The folder for the runs.
            steps: The steps of each run.
            say: Called with a line about each trial.
            on_virtual_time: Whether to use a clock without noise (`virtual_time`). Each plan then
                runs once, because a second run would be equal.
        """
        self._folder = folder
        self._on_virtual_time = on_virtual_time
        self._steps = steps
        self._say = say
        self._baselines: dict[Trial, StoredRun] = {}
        self._number = 0

    def judge(self, trial: Trial, start: Trial | None = None) -> Outcome:
        """Predict a trial from a baseline, by default that of its shape, then run both."""
        start = start or baseline_of(trial.shape)
        network = {} if trial.link == start.link else network_of(trial)
        simulation = predict(self.baseline_at(start), self.plan_of(trial, start), network)
        beside = measure_work(self.baseline_at(start))
        if not self._on_virtual_time:
            beside = work_of(self.run(start))
        name = trial.name
        if start.settings:
            name += f", from {start.name.partition(': ')[2]}"
        outcome = compare(name, simulation, work_of(self.run(trial)), beside)
        self._say(f"{name}: {outcome.step_error:+.1%} (A/A {outcome.same_error:+.1%})")
        return outcome

    def baseline(self, shape: str) -> StoredRun:
        """The recorded run of a shape."""
        return self.baseline_at(baseline_of(shape))

    def baseline_at(self, start: Trial) -> StoredRun:
        """The recorded run of a trial from which others start."""
        if start not in self._baselines:
            self._baselines[start] = only_run(self.run(start))
        return self._baselines[start]

    def plan_of(self, trial: Trial, start: Trial | None = None) -> Plan:
        """The plan of a trial, derived from a baseline's plan."""
        baseline = self.baseline_at(start or baseline_of(trial.shape))
        recorded = resolve_plan(observed_plan(baseline), baseline.manifest)
        return apply_changes(recorded, changes_of(trial), shapes_of(baseline.manifest))

    def predicted_best(self, shape: str, link: str) -> Trial:
        """The plan of the whole grid with the shortest predicted step on a link."""
        trials = [each for each in all_trials() if (each.shape, each.link) == (shape, link)]
        baseline = self.baseline(shape)
        return min(
            trials,
            key=lambda trial: (
                predict(baseline, self.plan_of(trial), network_of(trial)).predicted.step_time_ns
            ),
        )

    def run(self, trial: Trial, plan_file: Path | None = None) -> Path:
        """Train and record; a plan file replaces the settings of the trial.

        Returns:
            The folder of the run.

        Raises:
            RuntimeError: The trainer failed.
        """
        self._number += 1
        folder = self._folder / f"{self._number:03d}"
        clock = ["tests.studies.validation.virtual_time"] if self._on_virtual_time else []
        words = [*clock, *command_of(trial), f"--steps={self._steps}", f"--runs-dir={folder}"]
        run_trainer([*words, *([f"--plan={plan_file}"] if plan_file else [])], trial.name)
        return folder


def run_trainer(words: Sequence[str], name: str) -> None:
    """Run a module of the trainer.

    Args:
        words: The words of `python -m`.
        name: The run in messages.

    Raises:
        RuntimeError: The trainer failed.
    """
    command = [sys.executable, "-m", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} did not run: {done.stderr[-2000:]}")


def network_of(trial: Trial) -> dict[str, float]:
    """The network of a trial's prediction; empty: that of the baseline."""
    return {} if trial.link == BASELINE_LINK else LINKS[trial.link].network


def judge_grid(bench: EmulationBench, num_trials: int) -> list[Outcome]:
    """Judge each link's baseline plan and predicted best plan, and random others of the grid."""
    places = [(shape, link) for shape in SHAPES for link in LINKS]
    chosen = [Trial(shape, link) for shape, link in places if link != BASELINE_LINK]
    chosen += [bench.predicted_best(shape, link) for shape, link in places]
    others = [trial for trial in all_trials() if trial not in chosen]
    chosen += draw(others, max(num_trials - len(chosen), 0))
    return judge_all(bench, chosen[:num_trials])


def judge_all(bench: EmulationBench, trials: Sequence[Trial]) -> list[Outcome]:
    """Judge the trials one by one."""
    return [bench.judge(trial) for trial in trials]
