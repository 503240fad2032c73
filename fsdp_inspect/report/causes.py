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


def causes_table(
    causes_ns: Mapping[str, int], cause_ratios: Mapping[str, float] | None = None
) -> Table:
    """Causes of exposed time, with their share over all steps, and what each one means."""
    table = new_table("cause", "exposed", *(["all steps"] if cause_ratios else []), "<")
    for cause in {**causes_ns, **(cause_ratios or {})}:
        shares = [format_ratio(cause_ratios.get(cause, 0.0))] if cause_ratios else []
        meaning = Text(find_metric(f"{cause}_ns").definition, style="dim")
        table.add_row(format_cause(cause), format_ns(causes_ns.get(cause, 0)), *shares, meaning)
    return table
