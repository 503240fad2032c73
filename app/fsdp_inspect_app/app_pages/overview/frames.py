"""Build tables of the breakdown, the peak and logged numbers."""

import pandas as pd

from fsdp_inspect.formatting import format_owner
from fsdp_inspect.metrics import define_metric, find_metric
from fsdp_inspect.result_types import (
    ExposedOwner,
    PeakMoment,
    ScalarSeries,
    StepBreakdown,
)
from fsdp_inspect_app import wording
from fsdp_inspect_app.tables import mib, ms, percent


def frame_breakdown(breakdown: StepBreakdown, *, in_kernel_trace: bool = False) -> pd.DataFrame:
    """The parts of one step in order, and the step, which is their sum."""
    rows = [
        {
            "part": find_metric(f"{part.name}_ns").label,
            "time (ms)": ms(part.duration_ns),
            "share of the step (%)": percent(part.ratio),
            "meaning": define_metric(f"{part.name}_ns", in_kernel_trace=in_kernel_trace),
        }
        for part in breakdown.parts
    ]
    total = {
        "part": "= step",
        "time (ms)": ms(breakdown.step_time_ns),
        "share of the step (%)": 100.0,
        "meaning": find_metric("step_time_ns").definition,
    }
    return pd.DataFrame([*rows, total])


def name_owner(owner: ExposedOwner) -> str:
    """The name of the owner of a wait."""
    return format_owner(owner.fqn, owner.is_fsdp, owner.dimension)


def frame_peak(peak: PeakMoment) -> pd.DataFrame:
    """The memory at the peak by category."""
    return pd.DataFrame(
        [
            {
                "category": wording.name_category(category.category),
                "at the peak (MiB)": mib(category.bytes),
            }
            for category in peak.categories
        ]
    )


def frame_scalar(series: ScalarSeries) -> pd.DataFrame:
    """One logged number over the steps."""
    return pd.DataFrame({"step": series.steps, series.name: series.values})
