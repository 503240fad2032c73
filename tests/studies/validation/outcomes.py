"""Predict one plan, run it, and compare the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_inspect.simulation.recorded import RecordedWork, measure_work
from fsdp_inspect.simulation.simulate import Simulation, simulate_plan
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.plan import Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """One plan with its prediction and its measurement."""

    name: str
    measured_ns: int
    predicted_ns: int
    step_error: float
    """predicted / measured - 1."""
    same_error: float
    """A/A: the baseline that ran next to it / the recorded baseline - 1."""
    replay_error: float
    """The error of the replay of the recorded baseline: replayed / recorded - 1."""
    in_interval: bool
    """Whether the measured step is in the prediction's interval."""
    measured_peak: int | None
    memory_error: float | None

    @property
    def level_ns(self) -> float:
        """The measured step, scaled to the speed of the machine at the recording of the baseline.

        An equal effect of the machine on both runs of a pair cancels.
        """
        return self.measured_ns / (1 + self.same_error)

    @property
    def change_error(self) -> float:
        """The error of the predicted change, relative to the baseline that ran next to the plan."""
        return self.predicted_ns / self.level_ns - 1


def compare(
    name: str, simulation: Simulation, actual: RecordedWork, beside: RecordedWork
) -> Outcome:
    """Compare a prediction with the run of its plan, and the baseline with itself."""
    predicted = simulation.predicted
    return Outcome(
        name=name,
        measured_ns=actual.step_time_ns,
        predicted_ns=predicted.step_time_ns,
        step_error=predicted.step_time_ns / actual.step_time_ns - 1,
        same_error=beside.step_time_ns / simulation.recorded_step_ns - 1,
        replay_error=simulation.replay_error,
        in_interval=simulation.low_ns <= actual.step_time_ns <= simulation.high_ns,
        measured_peak=actual.peak_bytes,
        memory_error=_memory_error(predicted.peak_bytes, actual.peak_bytes),
    )


def _memory_error(predicted: int | None, actual: int | None) -> float | None:
    return predicted / actual - 1 if predicted and actual else None


def predict(baseline: StoredRun, plan: Plan, network: dict[str, float]) -> Simulation:
    """Predict a plan on a network from the baseline; an empty network is the baseline's own."""
    return simulate_plan(
        baseline,
        plan,
        bus_bytes_per_s=network.get("bus_bytes_per_s"),
        latency_ns=network.get("latency_ns"),
    )


def only_run(folder: Path) -> StoredRun:
    """The run that a trainer has just written to a folder."""
    return open_run(list_runs(folder)[0].path)


def work_of(folder: Path) -> RecordedWork:
    """The recorded work of that run."""
    return measure_work(only_run(folder))


@dataclass(frozen=True, slots=True)
class Errors:
    """The absolute errors of several predictions."""

    median: float
    high: float
    """The 90th percentile."""
    worst: float

    @classmethod
    def of(cls, errors: list[float]) -> Errors:
        """The summary of at least one error."""
        sizes = np.abs(errors)
        return cls(float(np.median(sizes)), float(np.percentile(sizes, 90)), float(np.max(sizes)))
