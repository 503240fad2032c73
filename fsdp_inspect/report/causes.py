"""How do the causes of a wait read? One word for tables, a phrase for sentences."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import new_table

_PHRASES = {
    "serialized": "queued behind another collective",
    "straggler": "until a later rank arrived",
    "floor": "the floor, which no setting hides",
    "blocking": "blocking the host",
    "late_issue": "issued too late",
    "bandwidth": "for want of bandwidth",
}


def format_cause(cause: str) -> str:
    """A cause in a table: `late issue`."""
    return cause.replace("_", " ")


def phrase_cause(cause: str) -> str:
    """A cause in a sentence: `issued too late`."""
    return _PHRASES[cause]


def causes_table(causes_ns: Mapping[str, int]) -> Table:
    """Causes of exposed time, each with its share of it and its meaning."""
    table = new_table("cause", "exposed", "share", "<")
    total = sum(causes_ns.values())
    for cause, duration in causes_ns.items():
        meaning = Text(find_metric(f"{cause}_ns").definition, style="dim")
        share = format_ratio(duration / total)
        table.add_row(format_cause(cause), format_ns(duration), share, meaning)
    return table
