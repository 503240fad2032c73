"""Define predicted values with their intervals, and predict reserved memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from fsdp_inspect.emulation.allocator.settings import LARGE_SEGMENT_BYTES


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


# --- Predict reserved memory: from the allocator model, or from the parts that it explains.
#
# For a forecast, the allocator model replays its allocations. Without a forecast, three parts are
# added to the allocated peak. No other stream reuses the blocks of sharded gradients, nor those
# of all-gathers, which have streams of their own. With offload, the input of the largest
# reduce-scatter counts instead of the gradients. The peak is in the loss or near it, and free
# blocks of the size of the float32 logits stay reserved.
#
# [Note: The high end]
# The allocator splits a free block for a smaller request. The next request of the block's own
# size then finds no free block, and gets a new segment. A small model has few large sizes, so
# most of its memory can be lost in this way. The high end gives a segment of its own to each
# large buffer of the compute stream that is not part of the allocated peak: the full parameters
# and the full gradients of the largest unit, the inputs of two reduce-scatters, and the scores of
# a block with their gradient if attention is not fused.
#
# A full device releases free blocks before it fails. So the low end is the allocated peak.


SEGMENTS_BYTES = 3 * LARGE_SEGMENT_BYTES
"""One partly used segment in each of FSDP2's three streams, at the high end: it matters for small
models only."""
MODEL_RATIO = 0.02
"""Half the interval of the allocator model beyond that of the forecast. Its difference from two
published figures is 0.1% and 0.8%; from whole snapshots, 0 (docs/figures.md)."""


@dataclass(frozen=True, slots=True)
class UnreusedBytes:
    """Reserved memory beyond the allocated peak."""

    parts: float
    """Sharded gradients, two all-gathers of the largest unit, and float32 logits."""
    split: float
    """What split blocks can add at most; see [Note: The high end]."""


def reserved_of(allocated: PlannedValue, unreused: UnreusedBytes) -> PlannedValue:
    """The reserved peak of a step without a forecast."""
    return replace(
        allocated,
        value=allocated.value + unreused.parts,
        high=allocated.high + unreused.parts + unreused.split + SEGMENTS_BYTES,
        assumption=(
            f"{allocated.assumption} Reserved memory is about {_gib(unreused.parts)} above it: "
            "gradients and all-gathers on streams of their own, and blocks of the size of the "
            f"logits. High: split blocks add {_gib(unreused.split)}."
        ),
    )


def reserved_of_forecast(allocated: PlannedValue, peak_bytes: int) -> PlannedValue:
    """The reserved peak of a forecast.

    Args:
        allocated: The allocated peak of the forecast.
        peak_bytes: The peak of the allocator model.
    """
    value = max(peak_bytes, allocated.value)
    return PlannedValue(
        value,
        allocated.low,
        value * allocated.high / allocated.value * (1 + MODEL_RATIO),
        ValueOrigin.ALLOCATOR,
        f"{allocated.assumption} A model of CUDA's caching allocator replayed three steps, with "
        "its default settings. Low: a full device releases all free blocks.",
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
