"""Format the causes of a wait: a word for tables, a phrase for sentences."""

from collections.abc import Mapping

from rich.console import RenderableType

from fsdp_inspect.analysis.exposed import CAUSES, list_causes
from fsdp_inspect.report.layout import render_table

_PHRASES = {
    "serialized": "queued behind another collective",
    "straggler": "waiting for the last rank to arrive",
    "floor": "the floor, which no setting can hide",
    "blocking": "collectives block the host",
    "late_issue": "issued too late",
    "bandwidth": "limited by bandwidth",
}


def format_cause(cause: str) -> str:
    """Format a cause for a table: `late issue`."""
    return cause.replace("_", " ")


def phrase_cause(cause: str) -> str:
    """Format a cause for a sentence: `issued too late`."""
    return _PHRASES[cause]


def causes_table(causes_ns: Mapping[str, int]) -> RenderableType:
    """Causes of an exposed time, each with its fraction of that time and its definition."""
    return render_table(CAUSES, list_causes(causes_ns))
