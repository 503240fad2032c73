"""Build tables of a simulated plan and the recorded plan."""

import pandas as pd

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.result_types import Played, Simulation
from fsdp_inspect_app.frames.values import mib, ms
from fsdp_inspect_app.played_memory_looks import HELD_LOOKS

RECORDED, PREDICTED = "recorded plan, simulated", "this plan, predicted"


def frame_parts(simulation: Simulation) -> pd.DataFrame:
    """The parts of both steps, and their sums."""
    before, after = simulation.replayed, simulation.predicted
    rows = [
        {
            "part": find_metric(f"{name}_ns").label,
            f"{RECORDED} (ms)": ms(duration),
            f"{PREDICTED} (ms)": ms(after.parts_ns[name]),
        }
        for name, duration in before.parts_ns.items()
    ]
    total = {
        "part": "= step",
        f"{RECORDED} (ms)": ms(before.step_time_ns),
        f"{PREDICTED} (ms)": ms(after.step_time_ns),
    }
    return pd.DataFrame([*rows, total])


def frame_peaks(simulation: Simulation) -> pd.DataFrame:
    """The memory at both peaks by category."""
    before, after = simulation.replayed, simulation.predicted
    return pd.DataFrame(
        [
            {
                "category": look.label,
                f"{RECORDED} (MiB)": mib(before.peak_categories.get(name, 0)),
                f"{PREDICTED} (MiB)": mib(after.peak_categories.get(name, 0)),
            }
            for name, look in HELD_LOOKS.items()
        ]
    )


def frame_played_units(played: Played) -> pd.DataFrame:
    """The units of a simulated plan, in order."""
    return pd.DataFrame(
        [
            {
                "unit": format_unit(unit.fqn),
                "exposed (ms)": ms(unit.exposed_ns),
                "all-gather (ms)": ms(unit.gather_ns),
                "all-gathers per step": unit.gathers_per_step,
                "unsharded (MiB)": mib(unit.unsharded_bytes),
                "parameters": unit.num_parameters,
            }
            for unit in played.units
        ]
    )
