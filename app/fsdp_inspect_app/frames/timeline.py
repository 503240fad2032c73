"""What does a timeline draw? As tables, one row a span."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.trace.bandwidth import bus_bytes_per_s
from fsdp_inspect.trace.codes import COLLECTIVES, Method, Phase, Source
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect_app.frames.values import BYTES_PER_GB, BYTES_PER_MIB, NS_PER_MS
from fsdp_inspect_app.timeline.payload import lane_label, method_words
from fsdp_inspect_app.timeline.tracks import LOOKS, StepTimeline


def frame_spans(
    timeline: StepTimeline, manifest: RunManifest, *, most: int | None = None
) -> pd.DataFrame:
    """What a timeline draws, lane by lane; the first `most` spans, or all."""
    spans = timeline.timed_spans.where(slice(most))
    lanes = [lane_label(lane, manifest) for lane in timeline.lanes]
    drawn = pd.DataFrame(
        {
            "lane": [lanes[lane] for lane in spans.lane.tolist()],
            "what": [LOOKS[look].label for look in spans.look.tolist()],
            "start (ms)": spans.start_ns / NS_PER_MS,
            "duration (ms)": (spans.end_ns - spans.start_ns) / NS_PER_MS,
        }
    )
    return pd.concat([drawn, _frame_events(timeline, manifest, spans.event)], axis="columns")


def _frame_events(
    timeline: StepTimeline, manifest: RunManifest, chosen: NDArray[np.int64]
) -> pd.DataFrame:
    """What is known about the chosen events beside their times."""
    events = timeline.events.where(chosen)
    units = {unit.index: format_unit(unit.fqn) for unit in manifest.units}
    travels = np.isin(events.kind, list(COLLECTIVES))
    shift = timeline.event_shift_ns[chosen]
    rates = bus_bytes_per_s(events, manifest.process_groups)
    return pd.DataFrame(
        {
            "rank": timeline.event_rank[chosen],
            "unit": [units.get(unit, "") for unit in events.unit.tolist()],
            "issued (ms)": np.where(travels, events.issue_ns + shift, np.nan) / NS_PER_MS,
            "phase": [Phase(phase).label for phase in events.phase.tolist()],
            "exposed (ms)": np.where(travels, timeline.exposed_ns[chosen] / NS_PER_MS, np.nan),
            "message (MiB)": np.where(events.bytes >= 0, events.bytes / BYTES_PER_MIB, np.nan),
            "bus bandwidth (GB/s)": rates / BYTES_PER_GB,
            "source": [Source(source).label for source in events.source.tolist()],
            "obtained": [method_words(Method(method)) for method in events.method.tolist()],
        }
    )
