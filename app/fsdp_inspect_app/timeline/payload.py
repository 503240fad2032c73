"""What does the canvas need to know to draw a window of a step, and to explain what is in it?"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_ns, format_unit
from fsdp_inspect.trace.bandwidth import bus_bytes_per_s
from fsdp_inspect.trace.codes import NO_UNIT, Method, Phase, Source
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect_app.timeline.lod import Drawing, SpanIndex, View
from fsdp_inspect_app.timeline.packing import pack
from fsdp_inspect_app.timeline.tracks import LOOKS, Lane, StepTimeline, Track

_TRACK_LABELS = {
    Track.ALL_GATHER: "all-gather",
    Track.REDUCE_SCATTER: "reduce-scatter",
    Track.ALL_REDUCE: "all-reduce",
    Track.OTHER_COLLECTIVE: "other collectives",
}


def clock_label(manifest: RunManifest) -> str:
    """What the first lane of a rank is: the queue on which its step is timed."""
    return "main thread" if manifest.device_type == "cpu" else "compute stream"


def lane_label(lane: Lane, manifest: RunManifest) -> str:
    """What a lane holds."""
    return clock_label(manifest) if lane.track is Track.CLOCK else _TRACK_LABELS[lane.track]


def describe_timeline(timeline: StepTimeline) -> str:
    """The picture in words, for those who cannot see it."""
    ranks = ", ".join(str(window.rank) for window in timeline.windows)
    return (
        f"Timeline of step {timeline.step} on ranks {ranks}: {format_ns(timeline.end_ns)}, "
        f"{len(timeline.spans)} spans in {len(timeline.lanes)} lanes. Hatched spans are exposed "
        "waits. Arrow keys step through the spans; the table below lists them all."
    )


def encode_timeline(
    timeline: StepTimeline,
    index: SpanIndex,
    manifest: RunManifest,
    *,
    view: View | None = None,
    highlighted_unit: int = NO_UNIT,
) -> bytes:
    """Pack what is drawn of a timeline.

    Args:
        timeline: One step.
        index: The index of its spans.
        manifest: For names of units and groups.
        view: The window in the browser; default the whole step.
        highlighted_unit: Index of the unit that stays bright; -1: all do.
    """
    asked = view or View(0, timeline.end_ns, 1600)
    sent = asked.widened(timeline.end_ns)
    drawing = index.query(sent)
    header = {
        "view_key": view_key(timeline, manifest),
        "axis_end_ns": timeline.end_ns,
        "data_start_ns": sent.start_ns,
        "data_end_ns": sent.end_ns,
        "sent_view": {
            "start_ns": sent.start_ns,
            "end_ns": sent.end_ns,
            "width_px": sent.width_px,
        },
        "is_exact": drawing.is_exact,
        "lanes": [_describe_lane(lane, manifest) for lane in timeline.lanes],
        "looks": [
            {"label": look.label, "colour": look.colour, "ink": look.ink, "hatched": look.hatched}
            for look in LOOKS
        ],
        "legend": np.unique(timeline.spans.look).tolist(),
        "units": [format_unit(unit.fqn) for unit in manifest.units],
        "phases": [phase.label for phase in Phase],
        "provenances": _provenances(),
        "windows": _describe_windows(timeline),
        "highlighted_unit": highlighted_unit,
        "aria_label": describe_timeline(timeline),
        "file_name": f"timeline-step-{timeline.step}.png",
    }
    return pack(header, _columns(timeline, drawing, manifest))


def view_key(timeline: StepTimeline, manifest: RunManifest) -> str:
    """Identity of a drawing: the browser keeps its zoom while it stays the same."""
    ranks = ",".join(str(window.rank) for window in timeline.windows)
    return f"{manifest.run_id}/{timeline.step}/{ranks}"


def _describe_lane(lane: Lane, manifest: RunManifest) -> Mapping[str, Any]:
    return {
        "rank": lane.rank,
        "row": lane.row,
        "label": lane_label(lane, manifest),
        "is_first": lane.track is Track.CLOCK,
    }


def _describe_windows(timeline: StepTimeline) -> list[dict[str, int]]:
    ranks = [lane.rank for lane in timeline.lanes]
    return [
        {
            "start_ns": window.start_ns,
            "end_ns": window.end_ns,
            "first_lane": ranks.index(window.rank),
            "last_lane": len(ranks) - 1 - ranks[::-1].index(window.rank),
        }
        for window in timeline.windows
    ]


def _columns(
    timeline: StepTimeline, drawing: Drawing, manifest: RunManifest
) -> dict[str, NDArray[np.generic]]:
    columns: dict[str, NDArray[np.generic]] = {
        "start": drawing.start_ns.astype("f8"),
        "duration": (drawing.end_ns - drawing.start_ns).astype("f8"),
        "lane": drawing.lane.astype("u2"),
        "look": drawing.look.astype("u1"),
        "shade": drawing.shade,
    }
    if drawing.is_exact:
        columns |= _detail_columns(timeline, timeline.spans.event[drawing.span], manifest)
    return columns


def _detail_columns(
    timeline: StepTimeline, chosen: NDArray[np.int64], manifest: RunManifest
) -> dict[str, NDArray[np.generic]]:
    events = timeline.events.where(chosen)
    shift = timeline.event_shift_ns[chosen]
    rates = bus_bytes_per_s(events, manifest.process_groups)
    return {
        "event": chosen.astype("i4"),
        "unit": events.unit,
        "issued_by": events.issued_by,
        "phase": events.phase.astype("u1"),
        "provenance": (events.source.astype("i2") * len(Method) + events.method).astype("u1"),
        "bytes": events.bytes.astype("f8"),
        "bus_bytes_per_s": np.where(np.isnan(rates), -1.0, rates),
        "exposed": timeline.exposed_ns[chosen].astype("f8"),
        "issue": (events.issue_ns + shift).astype("f8"),
        "need": np.where(events.need_ns >= 0, events.need_ns + shift, np.nan).astype("f8"),
    }


def _provenances() -> list[str]:
    return [f"{source.label}, {method_words(method)}" for source in Source for method in Method]


def method_words(method: Method) -> str:
    """How a time was obtained, in words."""
    if method is Method.HOST_BLOCKING:
        return "host time of a blocking call"
    return method.label
