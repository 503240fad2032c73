"""Render the changes of the step time during a run for a terminal of 80 columns."""

from collections.abc import Iterator

from rich.text import Text

from fsdp_inspect.analysis.drift import ChangePoint, Drift
from fsdp_inspect.formatting import format_ns, format_signed

MOST_CHANGES = 5
"""The most changes to list."""


def render_drift(drift: Drift) -> Iterator[Text]:
    """Render one line for each change: its cause, and other changes at the same time."""
    for change in drift.changes[:MOST_CHANGES]:
        yield Text(describe_change(change))
        for sentence in change.accounted_by:
            yield Text(f"  accounted for by {sentence}")
        for sentence in change.coincident:
            yield Text(f"  at the same time: {sentence}")


def describe_change(change: ChangePoint) -> str:
    """The change in one sentence."""
    return (
        f"From step {change.step} on: {format_ns(change.before_ns)} to "
        f"{format_ns(change.after_ns)} ({format_signed(change.change_ratio)})."
    )
