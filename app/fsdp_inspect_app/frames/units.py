"""What does each unit cost? As tables, one row a unit or a collective."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.report.causes import format_cause
from fsdp_inspect.report.values import format_kind
from fsdp_inspect.result_types import (
    Cause,
    CollectiveHistory,
    ExposedOwner,
    LinkFit,
    PeakMoment,
    Unit,
    UnitCollective,
    UnitCost,
    UnitHistory,
    UnitPrefetch,
)
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import gb_per_s, mib, ms


def frame_units(units: Sequence[UnitCost]) -> pd.DataFrame:
    """What each unit costs per step, in order of execution."""
    return pd.DataFrame([_unit_row(unit) for unit in units])


def _unit_row(unit: UnitCost) -> dict[str, Any]:
    return {
        "unit": format_unit(unit.fqn),
        "exposed (ms)": ms(unit.exposed_ns),
        "forward (ms)": ms(unit.forward_ns),
        "backward (ms)": ms(unit.backward_ns),
        "recompute (ms)": ms(unit.recompute_ns),
        "copies (ms)": ms(unit.copies_ns),
        **_collective_columns("all-gather", unit.all_gather),
        **_collective_columns("reduce-scatter", unit.reduce_scatter),
        **_collective_columns("all-reduce", unit.all_reduce),
        "prefetched per step": unit.prefetched_per_step,
        "parameters": unit.num_parameters,
        "unsharded (MiB)": mib(unit.unsharded_bytes),
        "reshard after forward": str(unit.reshard_after_forward),
        "class": unit.module_class,
    }


def _collective_columns(name: str, collective: UnitCollective) -> dict[str, Any]:
    if collective.count_per_step == 0 and name == "all-reduce":
        return {}
    return {
        f"{name}: exposed (ms)": ms(collective.exposed_ns),
        f"{name}: duration (ms)": ms(collective.duration_ns),
        f"{name}: per step": collective.count_per_step,
        f"{name}: message (MiB)": mib(collective.bytes),
        f"{name}: bus (GB/s)": gb_per_s(collective.bus_bytes_per_s),
    }


def frame_collectives(unit: UnitCost) -> pd.DataFrame:
    """The collectives of one unit, one row a kind that it has."""
    members = {
        "all-gather": unit.all_gather,
        "reduce-scatter": unit.reduce_scatter,
        "all-reduce": unit.all_reduce,
    }
    return pd.DataFrame(
        [
            {
                "collective": name,
                "per step": collective.count_per_step,
                "message (MiB)": mib(collective.bytes),
                "ranks": collective.group_size,
                "duration (ms)": ms(collective.duration_ns),
                "exposed per step (ms)": ms(collective.exposed_ns),
                "bus bandwidth (GB/s)": gb_per_s(collective.bus_bytes_per_s),
            }
            for name, collective in members.items()
            if collective.count_per_step
        ]
    )


def name_history(history: CollectiveHistory) -> str:
    """One of a unit's kinds of collectives: `all-gather, forward`."""
    return f"{format_kind(history.kind)}, {history.phase}"


def frame_history(history: UnitHistory) -> pd.DataFrame:
    """Every collective of one unit, one row each."""
    return pd.DataFrame(
        [
            {
                "collective": name_history(one),
                "step": each.step,
                "duration (ms)": ms(each.duration_ns),
                "exposed (ms)": ms(each.exposed_ns),
                "bus bandwidth (GB/s)": gb_per_s(each.bus_bytes_per_s),
            }
            for one in history.histories
            for each in one.collectives
        ]
    )


def frame_spreads(history: UnitHistory, fits: Mapping[str, LinkFit]) -> pd.DataFrame:
    """How each kind of collective of one unit spreads, beside what the run's fit says."""
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
    """When one unit holds memory in a step."""
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


def frame_prefetches(prefetches: Sequence[UnitPrefetch]) -> pd.DataFrame:
    """Whether the gathers of one unit were issued early, one row a phase."""
    return pd.DataFrame(
        [
            {
                "phase": one.phase,
                "all-gathers": one.num_gathers,
                "issued": ", ".join(
                    f"{issue} {count}" for issue, count in one.num_by_issue.items()
                ),
                "issued by": ", ".join(format_unit(fqn) for fqn in one.issued_by)
                or "its own hooks",
                "lead (ms)": ms(one.lead_ns),
                "in flight (ms)": ms(one.duration_ns),
                "hidden": one.hidden_ratio,
                "exposed per step (ms)": ms(one.exposed_ns),
            }
            for one in prefetches
        ]
    )


def frame_causes(owners: Sequence[ExposedOwner]) -> pd.DataFrame:
    """Why one unit is waited for: its waits per step by cause, one row a kind and phase."""
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
                "share of the step": owner.step_ratio,
            }
            for owner in owners
        ]
    )


def frame_owned(peak: PeakMoment, unit: int) -> pd.DataFrame:
    """What one unit owns at the highest moment of a memory step, by category."""
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
