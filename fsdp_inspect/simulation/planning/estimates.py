"""Define a predicted value with its interval, its origin and the assumption it depends on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum


class ValueOrigin(StrEnum):
    """The source of a predicted value."""

    FORMULA = "formula"
    """Closed-form sizes of tensors, and FSDP2's rules for buffers."""
    SIMULATION = "simulation"
    """A simulated step, with compute times from a roofline."""
    CALIBRATED = "calibrated simulation"
    """A simulated step, with compute times from a recorded run."""
    FORECAST = "forecast"
    """Storages of FSDP2's own code, counted on fake tensors."""
    ALLOCATOR = "allocator model"
    """The forecast's allocations, replayed on the model of CUDA's caching allocator."""
    DATASHEET = "datasheet"


@dataclass(frozen=True, slots=True)
class PlannedValue:
    """A value with the interval in which it is expected."""

    value: float
    low: float
    high: float
    origin: ValueOrigin
    assumption: str
    """The assumption that the interval depends on, in one sentence."""

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"Invalid interval: {self.value} is not between {self.low} and {self.high}."
            )

    def map(
        self, function: Callable[[float], float], assumption: str | None = None
    ) -> "PlannedValue":
        """The estimate of a monotonic function of the value.

        Args:
            function: Increasing or decreasing over the interval.
            assumption: The assumption of the result; None: as before.
        """
        ends = sorted((function(self.low), function(self.high)))
        return replace(
            self,
            value=function(self.value),
            low=ends[0],
            high=ends[1],
            assumption=self.assumption if assumption is None else assumption,
        )
