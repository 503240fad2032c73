"""Define what a search asks about a candidate, and answer it from closed formulas."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from fsdp_inspect.simulation.planning.bounds import Bounds, bound
from fsdp_inspect.simulation.planning.builder_candidates import BuilderCandidate
from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.forecast_step import ForecastStep
from fsdp_inspect.simulation.planning.machines import PlannedMachine
from fsdp_inspect.simulation.planning.prediction import (
    FORMULA_RATIO,
    PlannedMemory,
    PlanPrediction,
    judge_forecast,
    predict,
    predict_memory,
    step_ns,
)

C = TypeVar("C", bound=Candidate | BuilderCandidate)


class Predictor(ABC, Generic[C]):
    """Predicts candidates of one kind for a search."""

    machine: PlannedMachine

    @abstractmethod
    def bound(self, candidate: C) -> Bounds:
        """Bound a candidate without a simulation."""

    @abstractmethod
    def memory(self, candidate: C) -> PlannedMemory:
        """Predict the memory of a candidate, and judge it."""

    def settle(self, candidate: C) -> PlannedMemory | None:
        """Predict the memory of a candidate that the search reports, at any cost.

        None: `memory` is all there is.
        """
        return None

    @abstractmethod
    def ns_per_token(self, candidate: C) -> float:
        """Predict the time of a step for each of its tokens."""

    @abstractmethod
    def predict(self, candidate: C, memory: PlannedMemory | None = None) -> PlanPrediction:
        """Predict all values of a candidate; `memory`: its memory, if it is known."""


class FormulaPredictor(Predictor[Candidate]):
    """Predicts from closed formulas and a simulated step."""

    def __init__(
        self,
        job: Job,
        machine: PlannedMachine,
        forecast: Callable[[Candidate], ForecastStep | None] | None = None,
    ) -> None:
        """`forecast` makes the exact forecast of a candidate; it returns None if it cannot."""
        self.job, self.machine = job, machine
        self._forecast = forecast

    def bound(self, candidate: Candidate) -> Bounds:
        """Bound a candidate without a simulation."""
        least = bound(self.job, candidate, self.machine.speed)
        return replace(least, allocated_bytes=least.allocated_bytes * (1 - FORMULA_RATIO))

    def memory(self, candidate: Candidate) -> PlannedMemory:
        """Predict the memory of a candidate, and judge it."""
        return predict_memory(self.job, self.machine, candidate)

    def settle(self, candidate: Candidate) -> PlannedMemory | None:
        """Forecast the candidate's tensors, and replay them on the allocator model."""
        step = None if self._forecast is None else self._forecast(candidate)
        return None if step is None else judge_forecast(self.machine, step)

    def ns_per_token(self, candidate: Candidate) -> float:
        """Predict the time of a step for each of its tokens."""
        step = step_ns(self.job, candidate, self.machine.speed)
        return step / self.job.tokens_of_step(candidate)

    def predict(self, candidate: Candidate, memory: PlannedMemory | None = None) -> PlanPrediction:
        """Predict all values of a candidate; `memory`: its memory, if it is known."""
        return predict(self.job, self.machine, candidate, memory)
