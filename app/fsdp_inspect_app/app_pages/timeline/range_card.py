"""Show the sums of the selected range below the canvas: one table by kind, one by unit."""

import streamlit as st

from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect_app.cards import show_card, show_csv_button, show_note, show_table
from fsdp_inspect_app.tables import frame_of
from fsdp_inspect_app.timeline.range_sums import KindSum, RangeSums, UnitSum, sum_range
from fsdp_inspect_app.timeline.request import TimelineRequest
from fsdp_inspect_app.timeline.track_set import Tracks
from fsdp_inspect_app.wording import plain

MOST_UNITS = 12


def show_range(tracks: Tracks, asked: TimelineRequest, *, key: str) -> None:
    """Show the times in the selected range; nothing without a range."""
    if asked.summed is None:
        return
    member = tracks.members[asked.summed.member]
    sums = sum_range(member, asked.summed)
    if sums is None:
        return
    title = f" of {member.title}" if member.title else ""
    with show_card(f"Range on rank {sums.rank}{title}: {describe_range(sums)}", key=f"range-{key}"):
        by_kind, by_unit = st.columns(2)
        with by_kind:
            frame = frame_of(KindSum.TABLE, sums.kinds)
            show_table(frame, key=f"range-kinds-{key}", alt="Times in the range by kind")
            show_csv_button(frame, key=f"range-kinds-{key}")
        with by_unit:
            frame = frame_of(UnitSum.TABLE, sums.units[:MOST_UNITS])
            show_table(frame, key=f"range-units-{key}", alt="Times in the range by unit")
            show_csv_button(frame_of(UnitSum.TABLE, sums.units), key=f"range-units-{key}")
        show_note(plain(_describe_tables(sums)))


def describe_range(sums: RangeSums) -> str:
    """The length of the range, and its exposed time."""
    if sums.length_ns == 0:
        return "outside the step"
    exposed = f"{format_ns(sums.exposed_ns)} of {format_ns(sums.length_ns)} exposed"
    return f"{exposed} ({format_ratio(sums.exposed_ns / sums.length_ns)})"


def _describe_tables(sums: RangeSums) -> str:
    shown, total = min(len(sums.units), MOST_UNITS), len(sums.units)
    units = f" {shown} of {total} units; the CSV has all." if shown < total else ""
    return (
        "The kinds on the compute stream add up to the range. Collectives in flight overlap them."
        f"{units}"
    )
