"""Describe in one sentence which allocation failed and where.

The recorder prints this sentence when the training fails, and `report` shows the same sentence
later.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.reduction.order_wording import name_unit, shorten_place
from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.live_memory import OutOfMemoryRecord


def describe_out_of_memory(record: OutOfMemoryRecord, unit_names: Sequence[str]) -> str:
    """Describe the failed request, its position and the user's line of code.

    Args:
        record: The report of a rank.
        unit_names: The fqns of the units, by index.
    """
    asked = (
        "an allocation"
        if record.requested_bytes is None
        else (f"allocating {format_bytes(record.requested_bytes)}")
    )
    line = f" at {shorten_place(record.location)}" if record.location else ""
    return (
        f"Out of memory {describe_position(record, unit_names)}: {asked} failed{line}"
        f"{_state(record)}."
    )


def describe_position(record: OutOfMemoryRecord, unit_names: Sequence[str]) -> str:
    """The position, such as `in backward of layers.7, step 3`."""
    unit = "" if record.unit == NO_UNIT else f" of {name_unit(record.unit, unit_names)}"
    phase = "between phases" if record.phase == "outside" else f"in {record.phase}"
    return f"{phase}{unit}, step {record.step}"


def _state(record: OutOfMemoryRecord) -> str:
    if record.allocated_bytes is None:
        return ""
    state = f", with {format_bytes(record.allocated_bytes)}"
    if record.limit_bytes is not None:
        kind = "limit" if record.is_limit_requested else "device memory"
        state += f" of the {kind} of {format_bytes(record.limit_bytes)}"
    state += " allocated"
    if record.reserved_bytes is not None:
        state += f" and {format_bytes(record.reserved_bytes)} reserved"
    return state
