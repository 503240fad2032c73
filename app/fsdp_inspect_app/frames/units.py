"""Build tables of one unit: collectives, causes, memory and parameters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fsdp_inspect.analysis.units import COLLECTIVES_TABLE
from fsdp_inspect.report.wording import format_cause, format_kind
from fsdp_inspect.result_types import (
    Cause,
    CollectiveHistory,
    ExposedOwner,
    LinkFit,
    OneCollective,
    PeakMoment,
    Unit,
    UnitCost,
    UnitHistory,
)
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import frame_of, gb_per_s, mib, ms, percent


def frame_collectives(unit: UnitCost) -> pd.DataFrame:
    """The collectives of one unit, one row for each of its kinds."""
    kinds = {
        "all-gather": unit.all_gather,
        "reduce-scatter": unit.reduce_scatter,
        "all-reduce": unit.all_reduce,
    }
    present = {name: collective for name, collective in kinds.items() if collective.count_per_step}
    frame = frame_of(COLLECTIVES_TABLE, list(present.values()))
    frame.insert(0, "collective", list(present))
    return frame


def name_history(history: CollectiveHistory) -> str:
    """The name of one kind of a unit's collectives: `all-gather, forward`."""
    return f"{format_kind(history.kind)}, {history.phase}"


def frame_history(history: UnitHistory) -> pd.DataFrame:
    """All collectives of one unit, one row for each."""
    frame = frame_of(
        OneCollective.TABLE, [each for kind in history.histories for each in kind.collectives]
    )
    names = [name_history(kind) for kind in history.histories for _ in kind.collectives]
    frame.insert(0, "collective", names)
    return frame


def frame_spreads(history: UnitHistory, fits: Mapping[str, LinkFit]) -> pd.DataFrame:
    """The measured durations of a unit's collectives by kind, and those of the run's fit."""
    return pd.DataFrame(
        [_spread_row(one, fits.get(name_history(one))) for one in history.histories]
    )


def _spread_row(one: CollectiveHistory, fit: LinkFit | None) -> dict[str, Any]:
    expected, expected_rate = None, None
    if fit is not None and one.bytes is not None:
        expected = fit.predict_ns(one.bytes)
        expected_rate = fit.predict_bus_bytes_per_s(one.bytes)
    return {
        "collective": name_history(one),
        "how many": one.duration_ns.num_steps,
        "message (MiB)": mib(one.bytes),
        "p10 (ms)": ms(one.duration_ns.p10),
        "median (ms)": ms(one.duration_ns.median),
        "p90 (ms)": ms(one.duration_ns.p90),
        "by the run's fit (ms)": ms(expected),
        "bus bandwidth, median (GB/s)": gb_per_s(one.bus_bytes_per_s),
        "by the run's fit (GB/s)": gb_per_s(expected_rate),
    }


def frame_holds(history: UnitHistory) -> pd.DataFrame:
    """The times at which one unit holds memory in a step."""
    return pd.DataFrame(
        [
            {
                "category": wording.name_category(hold.category),
                "from (ms)": ms(hold.start_ns),
                "to (ms)": ms(hold.end_ns),
                "held (MiB)": mib(hold.bytes),
            }
            for hold in history.holds
        ]
    )


def frame_parameters(unit: Unit) -> pd.DataFrame:
    """The parameters of one unit, in the model's order."""
    return pd.DataFrame(
        [
            {
                "parameter": name,
                "shape": " x ".join(map(str, shape)) or "scalar",
                "parameters": math.prod(shape),
            }
            for name, shape in unit.parameters.items()
        ]
    )


def frame_causes(owners: Sequence[ExposedOwner]) -> pd.DataFrame:
    """The waits of one unit per step by cause, one row for each kind and phase."""
    return pd.DataFrame(
        [
            {
                "collective": f"{format_kind(owner.kind)}, {owner.phase}",
                "exposed (ms)": ms(owner.exposed_ns),
                **{
                    f"{format_cause(cause.label)} (ms)": ms(owner.causes_ns.get(cause.label, 0))
                    for cause in Cause
                    if any(cause.label in one.causes_ns for one in owners)
                },
                "share of the step (%)": percent(owner.step_ratio),
            }
            for owner in owners
        ]
    )


def frame_owned(peak: PeakMoment, unit: int) -> pd.DataFrame:
    """The memory that one unit owns at the peak of a memory step, by category."""
    return pd.DataFrame(
        [
            {
                "category": wording.name_category(category.category),
                "at the peak (MiB)": mib(category.bytes),
            }
            for owner in peak.owners
            if owner.unit == unit
            for category in owner.categories
        ]
    )
