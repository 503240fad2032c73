"""Make the data with which the canvas draws a window of a step and describes its spans."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_ns
from fsdp_inspect.result_types import RunManifest
from fsdp_inspect.trace.codes import NO_UNIT, Method, Phase, Source
from fsdp_inspect.trace.links import bus_bytes_per_s
from fsdp_inspect_app.timeline.difference import Difference
from fsdp_inspect_app.timeline.lod import MAX_RECTANGLES, MAX_SPANS, Drawing, OnAxis, View, draw
from fsdp_inspect_app.timeline.memory import MemoryCurve
from fsdp_inspect_app.timeline.rank_layout import LOOKS, Lane, Track
from fsdp_inspect_app.timeline.request import Jump, TimelineRequest
from fsdp_inspect_app.timeline.track_set import Place, SummedRange, Tracks, TrackSet
from fsdp_inspect_app.timeline.tracks import DrawnRank

MAX_READINGS = 8_000
"""The highest number of memory readings to send, over all ranks."""

_FIRST_WIDTH_PX = 1600
_TRACK_LABELS = {
    Track.ISSUE: "host issue",
    Track.HOST_STOP: "host stops",
    Track.ALL_GATHER: "all-gather",
    Track.REDUCE_SCATTER: "reduce-scatter",
    Track.ALL_REDUCE: "all-reduce",
    Track.OTHER_COLLECTIVE: "other collectives",
    Track.MEMORY: "memory",
}
_LANE_KINDS = {
    Track.ISSUE: "marks",
    Track.CLOCK: "clock",
    Track.HOST_STOP: "stops",
    Track.MEMORY: "memory",
}

_Columns = dict[str, NDArray[np.generic]]


def clock_label(manifest: RunManifest) -> str:
    """The label of the lane on which the step of a rank is timed."""
    return "main thread" if manifest.device_type == "cpu" else "compute stream"


def lane_label(lane: Lane, manifest: RunManifest) -> str:
    """The label of a lane."""
    if lane.track is Track.CLOCK:
        return clock_label(manifest)
    return f"{lane.dimension} collectives" if lane.dimension else _TRACK_LABELS[lane.track]


def describe_drawing(member: TrackSet) -> str:
    """Describe the drawing of a step in words, for screen readers."""
    timeline = member.timeline
    ranks = ", ".join(str(one.rank) for one in timeline.ranks)
    return (
        f"Timeline of step {timeline.step} on ranks {ranks}: {format_ns(timeline.end_ns)}, "
        f"{timeline.num_timed_spans} spans in {len(timeline.lanes)} lanes."
    )


def describe_tracks(tracks: Tracks) -> str:
    """Describe the whole drawing in words, and its keyboard controls."""
    pictures = [
        f"{member.title}: {describe_drawing(member)}" if member.title else describe_drawing(member)
        for member in tracks.members
    ]
    return (
        f"{' '.join(pictures)} Hatched spans are exposed waits. Arrow keys step through the "
        "spans, R sums a range, slash searches, question mark lists all keys."
    )


def encode_tracks(
    tracks: Tracks,
    asked: TimelineRequest,
    *,
    jump: Jump | None = None,
    difference: Difference | None = None,
    is_linked: bool = False,
) -> bytes:
    """Pack the data of a drawing.

    Args:
        tracks: One or several steps.
        asked: The state and the requests of the browser.
        jump: The jump of the page.
        difference: The difference to another run, for the strip below a rank.
        is_linked: Whether a copied link contains the state.
    """
    end_ns = max(tracks.end_ns, 1)
    sent = (asked.view or View(0, end_ns, _FIRST_WIDTH_PX)).widened(end_ns)
    shown = [OnAxis(drawn.layout.index, drawn.shift_ns) for _, drawn in tracks.shown_ranks]
    drawings = draw(shown, sent, max_spans=MAX_SPANS, max_rectangles=MAX_RECTANGLES)
    curves = _thin_curves(tracks, sent)
    header = {
        "key": tracks.key,
        "axis_end_ns": end_ns,
        "data_start_ns": sent.start_ns,
        "data_end_ns": sent.end_ns,
        "ns_per_px": (sent.end_ns - sent.start_ns) / sent.width_px,
        "is_exact": all(drawing.is_exact for drawing in drawings),
        "blocks": _describe_blocks(tracks),
        "lanes": _describe_lanes(tracks),
        "looks": [
            {"label": look.label, "colour": look.colour, "ink": look.ink, "hatched": look.hatched}
            for look in LOOKS
        ],
        "legend": _legend(tracks),
        "names": _searchable(tracks),
        "units": [name for member in tracks.members for name in member.unit_names],
        "phases": [phase.label for phase in Phase],
        "provenances": _provenances(),
        "memory": [
            _describe_curve(lane, curve, thinned, tracks.members[position])
            for lane, curve, thinned, position in curves
        ],
        "opening": _describe_opening(tracks, asked),
        "highlight": _describe_highlight(tracks, asked.query),
        "found": _describe_found(tracks, asked),
        "difference": None if difference is None else _describe_difference(difference),
        "jump": _describe_jump(tracks, jump),
        "is_linked": is_linked,
        "aria_label": describe_tracks(tracks),
        "file_name": f"timeline-step-{tracks.members[0].timeline.step}.png",
    }
    return pack(header, _columns(tracks, drawings) | _memory_columns(tracks, curves))


def _describe_blocks(tracks: Tracks) -> list[dict[str, Any]]:
    """The blocks of a drawing, one for each rank of each set: lanes, step and events."""
    blocks = []
    for position, drawn in tracks.shown_ranks:
        member, window = tracks.members[position], drawn.window
        first_lane = tracks.first_lane[position] + drawn.first_lane
        blocks.append(
            {
                "title": member.title,
                "rank": drawn.rank,
                "start_ns": window.start_ns,
                "end_ns": window.end_ns,
                "first_lane": first_lane,
                "last_lane": first_lane + len(drawn.layout.lanes) - 1,
                "first_event": tracks.first_event[position] + drawn.first_event,
                "is_apart": drawn.rank in member.timeline.refusals,
            }
        )
    return blocks


def _describe_lanes(tracks: Tracks) -> list[dict[str, Any]]:
    return [
        {
            "row": lane.row,
            "label": lane_label(lane, member.manifest),
            "kind": _LANE_KINDS.get(lane.track, "collective"),
        }
        for member in tracks.members
        for lane in member.timeline.lanes
    ]


def _legend(tracks: Tracks) -> list[int]:
    return sorted({look for member in tracks.members for look in member.timeline.looks})


def _describe_opening(tracks: Tracks, asked: TimelineRequest) -> dict[str, Any]:
    """The initial state of the browser, which later keeps its own state."""
    blocks, view = tracks.blocks, asked.view
    return {
        "view": None if view is None else [view.start_ns, view.end_ns],
        "selected": -1 if asked.selected is None else tracks.number(asked.selected),
        "query": asked.query,
        "pinned": [blocks.index(one) for one in asked.pinned if one in blocks],
        "range": _describe_range(asked.summed, blocks),
    }


def _describe_range(
    summed: SummedRange | None, blocks: Sequence[tuple[int, int]]
) -> dict[str, int] | None:
    if summed is None or (summed.member, summed.rank) not in blocks:
        return None
    block = blocks.index((summed.member, summed.rank))
    return {"start": summed.start_ns, "end": summed.end_ns, "block": block}


def _searchable(tracks: Tracks) -> list[str]:
    """The names that a search completes."""
    units = [name for member in tracks.members for name in member.unit_names]
    kinds = [LOOKS[look].label for look in _legend(tracks)]
    ranks = [f"rank {drawn.rank}" for _, drawn in tracks.shown_ranks]
    return list(dict.fromkeys([*units, *kinds, *ranks]))


def _describe_highlight(tracks: Tracks, query: str) -> dict[str, list[int] | None] | None:
    """What a search covers, in the numbering of the drawing; None: nothing is sought."""
    parsed = [(member, member.parse(query)) for member in tracks.members]
    sought = [(at, *one) for at, one in enumerate(parsed) if one[1] and not one[1].is_empty]
    if not sought:
        return None
    units: list[int] = []
    looks: set[int] = set()
    blocks: list[int] = []
    for at, _, search in sought:
        assert search is not None
        units += [tracks.first_unit[at] + unit for unit in search.units or ()]
        looks |= search.looks or set()
        blocks += [
            place
            for place, (position, rank) in enumerate(tracks.blocks)
            if position == at and rank == search.rank
        ]
    first = sought[0][2]
    assert first is not None
    return {
        "units": None if first.units is None else units,
        "looks": None if first.looks is None else sorted(looks),
        "blocks": None if first.rank is None else blocks,
    }


def _describe_difference(difference: Difference) -> dict[str, Any]:
    return {
        "block": difference.block,
        "label": "up: slower than B, down: faster",
        "spans": [
            {
                "name": change.name,
                "phase": change.phase,
                "start_ns": change.start_ns,
                "end_ns": change.end_ns,
                "own_ns": change.own_ns,
                "other_ns": change.other_ns,
                "delta_ns": change.delta_ns,
            }
            for change in difference.changes
        ],
    }


def _describe_found(tracks: Tracks, asked: TimelineRequest) -> dict[str, Any] | None:
    """The answer to a search; None without a search."""
    if not asked.query or asked.serial == 0:
        return None
    found = tracks.find(asked.query, after=asked.selected, direction=asked.direction)
    answer: dict[str, Any] = {
        "serial": asked.serial,
        "number": found.number,
        "total": found.total,
        "reason": found.reason,
        "event": -1,
    }
    return answer if found.place is None else answer | _locate(tracks, found.place)


def _describe_jump(tracks: Tracks, jump: Jump | None) -> dict[str, Any] | None:
    return None if jump is None else {"serial": jump.serial, **_locate(tracks, jump.place)}


def _locate(tracks: Tracks, place: Place) -> dict[str, Any]:
    drawn = tracks.members[place.member].timeline.rank_of(place.event)
    event = place.event - drawn.first_event
    return {
        "event": tracks.number(place),
        "start_ns": int(drawn.events.start_ns[event]) + drawn.shift_ns,
        "end_ns": int(drawn.events.end_ns[event]) + drawn.shift_ns,
    }


def _columns(tracks: Tracks, drawings: Sequence[Drawing]) -> _Columns:
    parts = []
    for (position, drawn), drawing in zip(tracks.shown_ranks, drawings, strict=True):
        first_lane = tracks.first_lane[position] + drawn.first_lane
        part: _Columns = {
            "start": drawing.start_ns.astype("f8"),
            "duration": (drawing.end_ns - drawing.start_ns).astype("f4"),
            "lane": (drawing.lane + first_lane).astype("u2"),
            "look": drawing.look.astype("u1"),
            "shade": drawing.shade,
        }
        if drawing.is_exact:
            part |= _detail_columns(tracks, position, drawn, drawing)
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _detail_columns(tracks: Tracks, position: int, drawn: DrawnRank, drawing: Drawing) -> _Columns:
    """The columns of tooltips; times of an event are relative to the start of its span."""
    manifest, layout = tracks.members[position].manifest, drawn.layout
    chosen = layout.index.spans.event[drawing.span]
    events = layout.events.where(chosen)
    begin = drawing.start_ns - drawn.shift_ns
    rates = bus_bytes_per_s(events, manifest.process_groups)
    places = _unit_places(manifest, tracks.first_unit[position])
    first_event = tracks.first_event[position] + drawn.first_event
    return {
        "event": (chosen + first_event).astype("i4"),
        "unit": places[events.unit],
        "issued_by": places[events.issued_by],
        "phase": events.phase.astype("u1"),
        "provenance": (events.source.astype("i2") * len(Method) + events.method).astype("u1"),
        "bytes": events.bytes.astype("f4"),
        "bus_bytes_per_s": np.where(np.isnan(rates), -1.0, rates).astype("f4"),
        "exposed": layout.exposed_ns[chosen].astype("f4"),
        "event_start": (events.start_ns - begin).astype("f4"),
        "event_end": (events.end_ns - begin).astype("f4"),
        "issue": (events.issue_ns - begin).astype("f4"),
        "need": np.where(events.need_ns >= 0, events.need_ns - begin, np.nan).astype("f4"),
    }


def _unit_places(manifest: RunManifest, first_unit: int) -> NDArray[np.int16]:
    """Convert a unit's index in the run to its index in the drawing; -1: none."""
    highest = max((unit.index for unit in manifest.units), default=NO_UNIT)
    places = np.full(highest + 2, NO_UNIT, dtype=np.int16)
    for position, unit in enumerate(manifest.units):
        places[unit.index] = first_unit + position
    return places


_LanedCurve = tuple[int, MemoryCurve, MemoryCurve, int]
"""The lane, its whole curve, the part in the window, and the index of its set."""


def _thin_curves(tracks: Tracks, view: View) -> list[_LanedCurve]:
    """The curves on the axis of the drawing."""
    sampled = [
        (position, drawn, drawn.layout.memory.moved(drawn.shift_ns))
        for position, drawn in tracks.shown_ranks
        if drawn.layout.memory is not None
    ]
    most = MAX_READINGS // max(len(sampled), 1)
    curves = []
    for position, drawn, curve in sampled:
        last_lane = drawn.first_lane + len(drawn.layout.lanes) - 1
        thinned = curve.thinned(view.start_ns, view.end_ns, most)
        curves.append((tracks.first_lane[position] + last_lane, curve, thinned, position))
    return curves


def _describe_curve(
    lane: int, curve: MemoryCurve, thinned: MemoryCurve, member: TrackSet
) -> dict[str, Any]:
    peak = curve.peak
    return {
        "lane": lane,
        "count": len(thinned),
        "top_bytes": curve.top_bytes,
        "has_reserved": bool(curve.reserved.max() >= 0),
        "peak_ns": int(curve.time_ns[peak]),
        "peak_bytes": int(curve.highest[peak]),
        "peak_unit": member.names.get(int(curve.unit[peak]), "outside all units"),
        "peak_phase": Phase(int(curve.phase[peak])).label,
    }


def _memory_columns(tracks: Tracks, curves: Sequence[_LanedCurve]) -> _Columns:
    if not curves:
        return {}
    shown = [thinned for _, _, thinned, _ in curves]
    units = [
        _unit_places(tracks.members[position].manifest, tracks.first_unit[position])[thinned.unit]
        for _, _, thinned, position in curves
    ]
    return {
        "memory_time": np.concatenate([curve.time_ns for curve in shown]).astype("f8"),
        "memory_allocated": np.concatenate([curve.allocated for curve in shown]).astype("f4"),
        "memory_highest": np.concatenate([curve.highest for curve in shown]).astype("f4"),
        "memory_reserved": np.concatenate([curve.reserved for curve in shown]).astype("f4"),
        "memory_unit": np.concatenate(units),
        "memory_phase": np.concatenate([curve.phase for curve in shown]).astype("u1"),
    }


def _provenances() -> list[str]:
    return [f"{source.label}, {method_words(method)}" for source in Source for method in Method]


def method_words(method: Method) -> str:
    """The method of a time, in words."""
    if method is Method.HOST_BLOCKING:
        return "host time of a blocking call"
    return method.label


# --- Pack arrays for the browser: one block of bytes with a JSON header and the columns.
#
# Layout, little-endian, every part padded to 8 bytes:
#
#     u32 length of the header | u32 zero | header | column 0 | column 1 | ...
#
# The header is the caller's dictionary with `columns` added: the name, the dtype (`f8`, `i4`, `u2`,
# `u1`) and the number of values of each column, in order.

DTYPES = ("f8", "f4", "i4", "i2", "u2", "u1")
"""The dtypes that the browser can read."""

_ALIGNMENT = 8


def pack(header: Mapping[str, Any], columns: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Pack a header and columns as bytes.

    Raises:
        ValueError: The browser cannot read the dtype of a column.
    """
    described = [_describe(name, values) for name, values in columns.items()]
    text = json.dumps({**header, "columns": described}, allow_nan=False).encode()
    parts = [struct.pack("<II", len(text), 0), text]
    parts += [
        values.astype(values.dtype.newbyteorder("<")).tobytes() for values in columns.values()
    ]
    return b"".join(part + bytes(-len(part) % _ALIGNMENT) for part in parts)


def _describe(name: str, values: NDArray[np.generic]) -> dict[str, str | int]:
    dtype = values.dtype.str[1:]
    if dtype not in DTYPES:
        raise ValueError(
            f"Column {name!r} has dtype {values.dtype}, which is not sent. "
            f"Convert it to one of {', '.join(DTYPES)}."
        )
    return {"name": name, "dtype": dtype, "length": len(values)}
