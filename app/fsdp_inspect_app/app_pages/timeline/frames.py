"""Describe the events of a timeline: as a table of all spans, as sums of a range, in one line."""

import numpy as np
import pandas as pd
import streamlit as st

from fsdp_inspect.formatting import (
    format_bytes,
    format_bytes_per_s,
    format_cause,
    format_ns,
    format_ratio,
    format_unit,
)
from fsdp_inspect.report.wording import format_kind, format_method
from fsdp_inspect.result_types import EventFacts, RunManifest
from fsdp_inspect.trace.codes import COLLECTIVES, Method, Phase, Source
from fsdp_inspect.trace.links import bus_bytes_per_s
from fsdp_inspect_app.cards import show_card, show_csv_button, show_note, show_table
from fsdp_inspect_app.tables import BYTES_PER_GB, BYTES_PER_MIB, NS_PER_MS, frame_of
from fsdp_inspect_app.timeline.payload import lane_label, method_words
from fsdp_inspect_app.timeline.range_sums import KindSum, RangeSums, UnitSum, sum_range
from fsdp_inspect_app.timeline.rank_layout import LOOKS
from fsdp_inspect_app.timeline.request import TimelineRequest
from fsdp_inspect_app.timeline.spans import Spans
from fsdp_inspect_app.timeline.track_set import Tracks
from fsdp_inspect_app.timeline.tracks import DrawnRank, StepTimeline
from fsdp_inspect_app.wording import code, plain


def frame_spans(
    timeline: StepTimeline, manifest: RunManifest, *, most: int | None = None
) -> pd.DataFrame:
    """The drawn spans, lane by lane: the first `most` spans, or all."""
    left = timeline.num_timed_spans if most is None else most
    frames = []
    for drawn in timeline.ranks:
        spans = drawn.layout.timed_spans.where(slice(left))
        frames.append(_frame_rank(drawn, spans, manifest))
        left -= len(spans)
    return pd.concat(frames, ignore_index=True)


def _frame_rank(drawn: DrawnRank, spans: Spans, manifest: RunManifest) -> pd.DataFrame:
    """Some spans of a rank, with the known facts about their events."""
    labels = [lane_label(lane, manifest) for lane in drawn.layout.lanes]
    events, shift = drawn.events.where(spans.event), drawn.shift_ns
    units = {unit.index: format_unit(unit.fqn) for unit in manifest.units}
    travels = np.isin(events.kind, list(COLLECTIVES))
    exposed_ns = drawn.layout.exposed_ns[spans.event]
    rates = bus_bytes_per_s(events, manifest.process_groups)
    return pd.DataFrame(
        {
            "lane": [labels[lane] for lane in spans.lane.tolist()],
            "what": [LOOKS[look].label for look in spans.look.tolist()],
            "start (ms)": (spans.start_ns + shift) / NS_PER_MS,
            "duration (ms)": (spans.end_ns - spans.start_ns) / NS_PER_MS,
            "rank": drawn.rank,
            "unit": [units.get(unit, "") for unit in events.unit.tolist()],
            "issued (ms)": np.where(travels, events.issue_ns + shift, np.nan) / NS_PER_MS,
            "phase": [Phase(phase).label for phase in events.phase.tolist()],
            "exposed (ms)": np.where(travels, exposed_ns / NS_PER_MS, np.nan),
            "message (MiB)": np.where(events.bytes >= 0, events.bytes / BYTES_PER_MIB, np.nan),
            "bus bandwidth (GB/s)": rates / BYTES_PER_GB,
            "source": [Source(source).label for source in events.source.tolist()],
            "obtained": [method_words(Method(method)) for method in events.method.tolist()],
        }
    )


# --- Show the sums of the selected range below the canvas: one table by kind, one by unit.


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


# --- Describe one event in one line.


def name_event(facts: EventFacts) -> str:
    """The name of an event, as Markdown: `**all-gather** layers.1`."""
    named = "" if facts.fqn is None else f" {code(format_unit(facts.fqn))}"
    return f"**{plain(format_kind(facts.kind))}**{named}"


def tell_event(facts: EventFacts) -> str:
    """Describe the important properties of an event in one line, as Markdown."""
    parts = [
        "" if facts.phase == "outside" else facts.phase,
        _tell_message(facts),
        format_ns(facts.duration_ns),
        _tell_bandwidth(facts),
        _tell_lead(facts),
        _tell_exposed(facts),
    ]
    return f"{name_event(facts)} · {plain(' · '.join(part for part in parts if part))}"


def tell_origin(facts: EventFacts) -> str:
    """Describe the time of an event, its issuer, and the method, as plain text."""
    parts = [f"{format_ns(facts.start_ns)} after the step began"]
    if facts.issued_by is not None:
        parts.append(f"issued by {format_unit(facts.issued_by)}")
    if facts.group is not None:
        parts.append(f"process group {facts.group}")
    parts.append(f"{facts.source}, {format_method(facts.method)}")
    return " · ".join(parts)


def _tell_exposed(facts: EventFacts) -> str:
    """Describe the exposed time of an event and its causes; empty if it is not a collective."""
    if facts.exposed_ns is None:
        return ""
    if facts.exposed_ns == 0:
        return "not exposed"
    causes = [
        f"{format_cause(cause)} {format_ns(spent)}" for cause, spent in facts.causes_ns.items()
    ]
    if len(causes) == 1:
        causes = [format_cause(next(iter(facts.causes_ns)))]
    return f"exposed {format_ns(facts.exposed_ns)}: {', '.join(causes)}"


def tell_wait(facts: EventFacts) -> str:
    """Describe a wait in short, as Markdown: its owner, its duration and its main cause."""
    cause = format_cause(next(iter(facts.causes_ns), ""))
    spent = plain(" · ".join(filter(None, (format_ns(facts.exposed_ns), cause))))
    return f"{name_event(facts)} {spent}"


def _tell_message(facts: EventFacts) -> str:
    if facts.bytes is None:
        return ""
    return f"{format_bytes(facts.bytes)}{f' of {facts.dtype}' if facts.dtype else ''}"


def _tell_bandwidth(facts: EventFacts) -> str:
    if facts.bus_bytes_per_s is None:
        return ""
    rate = f"{format_bytes_per_s(facts.bus_bytes_per_s)} bus"
    if facts.fit_bus_bytes_per_s is None:
        return rate
    return f"{rate} (fit {format_bytes_per_s(facts.fit_bus_bytes_per_s)})"


def _tell_lead(facts: EventFacts) -> str:
    if facts.lead_ns is None:
        return ""
    if facts.lead_ns == 0:
        return "issued when it was needed"
    side = "after" if facts.lead_ns < 0 else "before"
    return f"issued {format_ns(abs(facts.lead_ns))} {side} it was needed"
