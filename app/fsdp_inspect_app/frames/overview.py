"""What does a run say? As tables, one row a thing, units in the names of the columns."""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect.formatting import format_owner
from fsdp_inspect.metrics import define_metric, find_metric
from fsdp_inspect.report.values import format_kind
from fsdp_inspect.result_types import (
    ExposedOwner,
    MemoryOfStep,
    PeakMoment,
    ScalarSeries,
    StepBreakdown,
    StepPoint,
)
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import mib, ms


def frame_breakdown(breakdown: StepBreakdown, *, in_kernel_trace: bool = False) -> pd.DataFrame:
    """The parts of one step, in order, and the step that they add up to."""
    rows = [
        {
            "part": find_metric(f"{part.name}_ns").label,
            "time (ms)": ms(part.duration_ns),
            "share of the step": part.ratio,
            "meaning": define_metric(f"{part.name}_ns", in_kernel_trace=in_kernel_trace),
        }
        for part in breakdown.parts
    ]
    total = {
        "part": "= step",
        "time (ms)": ms(breakdown.step_time_ns),
        "share of the step": 1.0,
        "meaning": find_metric("step_time_ns").definition,
    }
    return pd.DataFrame([*rows, total])


def frame_owners(owners: Sequence[ExposedOwner]) -> pd.DataFrame:
    """Who is waited for, most exposed first."""
    return pd.DataFrame(
        [
            {
                "unit": name_owner(owner),
                "collective": format_kind(owner.kind),
                "phase": owner.phase,
                "exposed (ms)": ms(owner.exposed_ns),
                "of it floor (ms)": ms(owner.floor_ns),
                "share of the step": owner.step_ratio,
                "in flight (ms)": ms(owner.duration_ns),
                "per step": owner.count_per_step,
            }
            for owner in owners
        ]
    )


def name_owner(owner: ExposedOwner) -> str:
    """The unit that is waited for."""
    return format_owner(owner.fqn, owner.is_fsdp)


def frame_steps(points: Sequence[StepPoint]) -> pd.DataFrame:
    """Step times over steps."""
    return pd.DataFrame(
        [
            {
                "step": point.step,
                "step time (ms)": ms(point.step_time_ns),
                "communication (ms)": ms(point.communication_ns),
                "exposed (ms)": ms(point.exposed_ns),
                "counts": point.is_timed,
            }
            for point in points
        ]
    )


def frame_memory(steps: Sequence[MemoryOfStep]) -> pd.DataFrame:
    """The highest memory of each step."""
    return pd.DataFrame(
        [
            {
                "step": step.step,
                "allocated (MiB)": mib(step.highest_allocated_bytes),
                "reserved (MiB)": mib(step.highest_reserved_bytes),
            }
            for step in steps
        ]
    )


def frame_peak(peak: PeakMoment) -> pd.DataFrame:
    """What fills memory at its highest moment, by category."""
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
    """One logged number over steps."""
    return pd.DataFrame({"step": series.steps, series.name: series.values})
