"""Build tables of a timeline with one row for each span."""

import numpy as np
import pandas as pd

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.result_types import RunManifest
from fsdp_inspect.trace.codes import COLLECTIVES, Method, Phase, Source
from fsdp_inspect.trace.links import bus_bytes_per_s
from fsdp_inspect_app.tables import BYTES_PER_GB, BYTES_PER_MIB, NS_PER_MS
from fsdp_inspect_app.timeline.payload import lane_label, method_words
from fsdp_inspect_app.timeline.rank_layout import LOOKS
from fsdp_inspect_app.timeline.spans import Spans
from fsdp_inspect_app.timeline.tracks import DrawnRank, StepTimeline


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
