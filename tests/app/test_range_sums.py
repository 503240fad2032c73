"""The sums of a range are those that a count over every nanosecond-edge gives."""

from itertools import pairwise
from pathlib import Path

import pytest
from fsdp_inspect_app.timeline.range_sums import sum_range
from fsdp_inspect_app.timeline.rank_layout import LOOKS, Track
from fsdp_inspect_app.timeline.track_set import SummedRange, TrackSet
from fsdp_inspect_app.timeline.tracks import build_timeline

from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.store.reader import open_run

SAMPLE = Path(__file__).parents[2] / "samples/async-prefetch-2-ranks"


@pytest.fixture(scope="module")
def tracks():
    run = open_run(SAMPLE)
    return TrackSet(build_timeline(run, step=5, ranks=(1, 0)), run.manifest)


def spans_of(tracks, rank):
    """(is on the compute stream, label, unit, start, end) of each span, on the axis."""
    drawn = tracks.timeline.find_rank(rank)
    spans = drawn.layout.timed_spans
    columns = (spans.lane, spans.look, spans.event, spans.start_ns, spans.end_ns)
    for lane, look, event, start, end in zip(*(one.tolist() for one in columns), strict=True):
        is_on_clock = drawn.layout.lanes[lane].track is Track.CLOCK
        unit = int(drawn.events.unit[event])
        yield (is_on_clock, LOOKS[look].label, unit, start + drawn.shift_ns, end + drawn.shift_ns)


def covered(spans, low, high):
    """The length of [low, high) in which any of the spans is open, edge by edge."""
    edges = sorted({low, high, *(t for span in spans for t in span[3:] if low < t < high)})
    return sum(
        end - start
        for start, end in pairwise(edges)
        if any(span[3] <= start and span[4] >= end for span in spans)
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0.2, 0.7), (0.4, 0.41)])
def test_the_sums_are_exact(tracks, rank, first, last):
    window = tracks.timeline.find_rank(rank).window
    length = window.end_ns - window.start_ns
    low, high = (window.start_ns + int(share * length) for share in (first, last))
    sums = sum_range(tracks, SummedRange(0, rank, low, high))
    spans = [*spans_of(tracks, rank)]
    for kind in sums.kinds:
        if kind.label != "other":
            own = [s for s in spans if s[0] == kind.is_on_clock and s[1] == kind.label]
            assert kind.duration_ns == covered(own, low, high), kind.label
    assert sum(kind.duration_ns for kind in sums.kinds if kind.is_on_clock) == high - low
    assert sums.exposed_ns == covered(
        [s for s in spans if s[0] and s[1].startswith("exposed")], low, high
    )
    units = dict(zip(tracks.unit_names, tracks.manifest.units, strict=True))
    assert len(sums.units) > 0
    for unit in sums.units:
        index = -1 if unit.name is None else units[unit.name].index
        own = [s for s in spans if s[2] == index]
        waits = [s for s in own if s[0] and s[1].startswith("exposed")]
        assert unit.exposed_ns == covered(waits, low, high), unit.name
        assert unit.in_flight_ns == covered([s for s in own if not s[0]], low, high), unit.name


def test_the_whole_step_has_the_exposed_time_of_the_breakdown(tracks):
    window = tracks.timeline.find_rank(0).window
    sums = sum_range(tracks, SummedRange(0, 0, window.start_ns - 10, window.end_ns + 10))
    breakdown = measure_step_breakdown(open_run(SAMPLE), rank=0, step=5)
    assert sums.exposed_ns == breakdown.exposed_ns
    assert sums.length_ns == breakdown.step_time_ns


def test_a_range_outside_the_step_or_of_a_hidden_rank_has_no_times(tracks):
    assert sum_range(tracks, SummedRange(0, 7, 0, 10)) is None
    end = tracks.timeline.end_ns
    sums = sum_range(tracks, SummedRange(0, 0, end + 5, end + 9))
    assert (sums.length_ns, sums.kinds, sums.units) == (0, (), ())
