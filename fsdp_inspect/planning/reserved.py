"""Predict reserved memory from allocated memory: the place where an allocator model plugs in.

Reserved memory is at least the allocated peak. The published ratios are 1.205 and 1.157: torchtitan
reserves 82.4 and 67.0 GiB for Llama 3.1 8B on 8 and 128 GPUs, where the forecast allocates 68.4 and
57.9 GiB (docs/gate.md). The interval is 1.0 to the higher ratio, the value the lower one.
"""

from dataclasses import replace

from fsdp_inspect.planning.estimates import PlannedValue

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
