"""What does each unit cost? As tables, one row a unit or a collective."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fsdp_inspect.analysis.units import UnitCollective, UnitCost
from fsdp_inspect.formatting import format_unit
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
        f"{name}: duration (ms)": ms(collective.median_ns),
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
                "duration (ms)": ms(collective.median_ns),
                "exposed per step (ms)": ms(collective.exposed_ns),
                "bus bandwidth (GB/s)": gb_per_s(collective.bus_bytes_per_s),
            }
            for name, collective in members.items()
            if collective.count_per_step
        ]
    )
