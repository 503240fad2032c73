"""Predict reserved memory: from the allocator model, or from the parts that it explains.

For a forecast, the allocator model replays its allocations. Without a forecast, three parts are
added to the allocated peak. No other stream reuses the blocks of sharded gradients, nor those of
all-gathers, which have streams of their own. With offload, the input of the largest reduce-scatter
counts instead of the gradients. The peak is in the loss or near it, and free blocks of
the size of the float32 logits stay reserved.

A full device releases free blocks before it fails. So the low end is the allocated peak.
"""

from dataclasses import replace

from fsdp_inspect.allocator.settings import LARGE_SEGMENT_BYTES
from fsdp_inspect.planning.estimates import PlannedValue, ValueOrigin

PARTS_RATIO = 1.6
"""High end of the parts, as a fraction of their sum. In 22 forecasts of Llama 1B, 8B and 70B
with 3 to 16 blocks, reserved memory beyond the allocated peak is 0.47 to 1.43 of the sum
(docs/planning.md)."""
SEGMENTS_BYTES = 3 * LARGE_SEGMENT_BYTES
"""One partly used segment in each of FSDP2's three streams, at the high end: it matters for small
models only."""
MODEL_RATIO = 0.02
"""Half the interval of the allocator model beyond that of the forecast. Its difference from two
published figures is 0.1% and 0.8%; from whole snapshots, 0 (docs/figures.md)."""


def reserved_of(allocated: PlannedValue, parts_bytes: float) -> PlannedValue:
    """The reserved peak of a step without a forecast.

    Args:
        allocated: The allocated peak.
        parts_bytes: Sharded gradients, two all-gathers and float32 logits.
    """
    return replace(
        allocated,
        value=allocated.value + parts_bytes,
        high=allocated.high + PARTS_RATIO * parts_bytes + SEGMENTS_BYTES,
        assumption=(
            f"{allocated.assumption} Reserved memory is up to {parts_bytes / 2**30:.3g} GiB x "
            f"{PARTS_RATIO} above it: gradients and all-gathers on streams of their own, and "
            "blocks of the size of the logits."
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
