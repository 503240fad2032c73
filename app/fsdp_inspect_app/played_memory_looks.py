"""Define the colours of the memory categories in a simulated step."""

from fsdp_inspect.report import palette
from fsdp_inspect.report.palette import Look
from fsdp_inspect.result_types import Held

_RESTING = palette.MEMORY_LOOKS["sharded_parameter"]


_REST = palette.MEMORY_LOOKS["unattributed"]


HELD_LOOKS = {
    Held.RESTING.label: Look("sharded parameters, optimizer state", _RESTING.colour, _RESTING.ink),
    Held.REST.label: Look("inputs, buffers, other", _REST.colour, _REST.ink),
    Held.SHARDED_PARAMETER.label: Look("kept in smaller groups", "#6D73E5", "#111418"),
    **{
        held.label: palette.MEMORY_LOOKS[held.label]
        for held in Held
        if held not in (Held.RESTING, Held.REST, Held.SHARDED_PARAMETER)
    },
}
"""The look of each memory category in a simulated step."""
