"""Predict reserved memory: from the allocator model, or from published ratios.

For a forecast, the allocator model replays its allocations. Without a forecast, reserved memory is
at least the allocated peak. The published ratios are 1.205 and 1.157: torchtitan reserves 82.4 and
67.0 GiB for Llama 3.1 8B on 8 and 128 GPUs, where the forecast allocates 68.4 and 57.9 GiB
(docs/gate.md). The interval is 1.0 to the higher ratio, the value the lower one.
"""

from dataclasses import replace

from fsdp_inspect.planning.estimates import PlannedValue, ValueOrigin

RATIOS = (1.0, 1.157, 1.205)
"""Reserved / allocated: low, typical, high."""


def reserved_of(allocated: PlannedValue) -> PlannedValue:
    """The reserved peak of a step with this allocated peak."""
    low, typical, high = RATIOS
    return replace(
        allocated,
        value=allocated.value * typical,
        low=allocated.low * low,
        high=allocated.high * high,
        assumption=(
            f"{allocated.assumption} Reserved memory is {low:.2f} to {high:.2f} times the "
            "allocated peak, as published for torchtitan."
        ),
    )


MODEL_RATIO = 0.02
"""Half the interval of the allocator model beyond that of the forecast. Its difference from two
published figures is 0.1% and 0.8%; from whole snapshots, 0 (docs/figures.md)."""


def reserved_of_forecast(allocated: PlannedValue, peak_bytes: int | None) -> PlannedValue:
    """The reserved peak of a forecast.

    Args:
        allocated: The allocated peak of the forecast.
        peak_bytes: The peak of the allocator model; None: the history was too long for it.
    """
    if peak_bytes is None:
        return reserved_of(allocated)
    value = max(peak_bytes, allocated.value)
    return PlannedValue(
        value,
        value * allocated.low / allocated.value * (1 - MODEL_RATIO),
        value * allocated.high / allocated.value * (1 + MODEL_RATIO),
        ValueOrigin.ALLOCATOR,
        f"{allocated.assumption} A model of CUDA's caching allocator replayed three steps, with "
        "its default settings.",
    )
