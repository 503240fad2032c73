"""Build tables of memory, in MiB."""

import pandas as pd

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.result_types import (
    AllocatorUse,
    Composition,
    StepMemory,
)
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import mib, ms

NO_UNIT_NAME = "(no unit)"

_TIME = "since the first reading (ms)"


def name_place(fqn: str | None) -> str:
    """The name of a unit; for None, the text for no unit."""
    return NO_UNIT_NAME if fqn is None else format_unit(fqn)


def frame_step_memory(memory: StepMemory) -> pd.DataFrame:
    """All readings of one step by time, with their categories if these are known."""
    readings = pd.DataFrame(
        [
            {
                _TIME: ms(reading.offset_ns),
                "phase": reading.phase,
                "unit": name_place(reading.fqn),
                "reading": reading.point.replace("_", " "),
                "allocated (MiB)": mib(reading.allocated_bytes),
                "highest since the one before (MiB)": mib(reading.highest_bytes),
                "reserved (MiB)": mib(reading.reserved_bytes),
            }
            for reading in memory.readings
        ]
    )
    if memory.composition is None:
        return readings
    categories = _frame_composition(memory.composition)
    if len(categories) == len(readings):
        return pd.concat([readings, categories.drop(columns=_TIME)], axis="columns")
    return pd.concat([readings, categories], ignore_index=True).sort_values(_TIME)


def _frame_composition(composition: Composition) -> pd.DataFrame:
    columns = {
        f"{wording.name_category(series.category)} (MiB)": [mib(one) for one in series.bytes]
        for series in composition.series
    }
    return pd.DataFrame({_TIME: [ms(offset) for offset in composition.offsets_ns], **columns})


def frame_allocator(use: AllocatorUse) -> pd.DataFrame:
    """The memory of the allocator and the device; unknown amounts are missing."""
    of_step = f"at the highest sample, step {use.step}"
    rows = [
        ("allocated", mib(use.allocated_bytes), of_step),
        ("active", mib(use.active_bytes), of_step),
        ("reserved", mib(use.reserved_bytes), of_step),
        *(
            (find_metric(name).label, mib(getattr(use, name)), find_metric(name).definition)
            for name in ("inactive_split_bytes", "device_used_bytes", "outside_allocator_bytes")
        ),
    ]
    return pd.DataFrame(rows, columns=["what", "amount (MiB)", "meaning"])
