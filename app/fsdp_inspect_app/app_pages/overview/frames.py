"""Build tables of the breakdown, the peak and logged numbers."""

import pandas as pd

from fsdp_inspect.metrics import define_metric, find_metric
from fsdp_inspect.result_types import StepBreakdown
from fsdp_inspect_app.tables import ms, percent


def frame_breakdown(breakdown: StepBreakdown, *, in_kernel_trace: bool = False) -> pd.DataFrame:
    """The parts of one step in order, and the step, which is their sum."""
    rows = [
        (
            find_metric(f"{part.name}_ns").label,
            ms(part.duration_ns),
            percent(part.ratio),
            define_metric(f"{part.name}_ns", in_kernel_trace=in_kernel_trace),
        )
        for part in breakdown.parts
    ]
    definition = find_metric("step_time_ns").definition
    rows.append(("= step", ms(breakdown.step_time_ns), 100.0, definition))
    return pd.DataFrame(rows, columns=["part", "time (ms)", "share of the step (%)", "meaning"])
