"""What fills memory, when and where? As tables, amounts in MiB."""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.result_types import (
    AllocatorUse,
    Composition,
    MemoryOfStep,
    PeakMoment,
    PositionBytes,
    RankMemory,
    StepMemory,
)
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import mib, ms

NO_UNIT_NAME = "(no unit)"

_TIME = "since the first reading (ms)"


def name_place(fqn: str | None) -> str:
    """A unit, or that there is none."""
    return NO_UNIT_NAME if fqn is None else format_unit(fqn)


def frame_step_memory(memory: StepMemory) -> pd.DataFrame:
    """Every reading of one step, by time, with the categories where they are known."""
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


def frame_alive(peak: PeakMoment) -> pd.DataFrame:
    """What is alive at the peak: a row for each owner, a column for each category."""
    held = {
        name_place(owner.fqn): {one.category: one.bytes for one in owner.categories}
        for owner in peak.owners
    }
    return pd.DataFrame(
        [
            {
                "unit": name_place(owner.fqn),
                "all (MiB)": mib(owner.bytes),
                **{
                    f"{wording.name_category(one.category)} (MiB)": mib(
                        held[name_place(owner.fqn)].get(one.category, 0)
                    )
                    for one in peak.categories
                },
            }
            for owner in peak.owners
        ]
    )


def frame_growth(steps: Sequence[MemoryOfStep]) -> pd.DataFrame:
    """The highest memory of each step, and what it leaves."""
    return pd.DataFrame(
        [
            {
                "step": step.step,
                "allocated at most (MiB)": mib(step.highest_allocated_bytes),
                "allocated at the end (MiB)": mib(step.allocated_at_end_bytes),
                "reserved at most (MiB)": mib(step.highest_reserved_bytes),
            }
            for step in steps
        ]
    )


def frame_rank_memory(ranks: Sequence[RankMemory]) -> pd.DataFrame:
    """One row a rank."""
    return pd.DataFrame(
        [
            {
                "rank": rank.rank,
                "peak allocated (MiB)": mib(rank.peak_allocated_bytes),
                "peak reserved (MiB)": mib(rank.peak_reserved_bytes),
                "resting (MiB)": mib(rank.resting_bytes),
                "a step adds (MiB)": mib(rank.step_adds_bytes),
                "device (MiB)": mib(rank.device_bytes),
                "never taken (MiB)": mib(rank.headroom_bytes),
            }
            for rank in ranks
        ]
    )


def frame_positions(positions: Sequence[PositionBytes]) -> pd.DataFrame:
    """The highest readings by the place of the program."""
    return pd.DataFrame(
        [
            {
                "unit": name_place(place.fqn),
                "phase": place.phase,
                "step": place.step,
                "allocated (MiB)": mib(place.bytes),
            }
            for place in positions
        ]
    )


def frame_allocator(use: AllocatorUse) -> pd.DataFrame:
    """What the allocator and the device hold; amounts that were not seen are missing."""
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
