"""The drawing of a step agrees with the analysis of that step."""

import numpy as np
import pytest
from fsdp_inspect_app.timeline.rank_layout import LOOKS, Track
from fsdp_inspect_app.timeline.tracks import build_timeline, draw_events

from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.report import palette
from fsdp_inspect.trace.codes import EventFlag, EventKind, StepPart
from fsdp_inspect.trace.tables import EventTable
from tests.app.synthetic import make_run
from tests.builders import RunBuilder


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def timeline(run):
    return build_timeline(run, step=3, ranks=[0, 1])


def spans_of(timeline, rank, track, look=None):
    """The drawn spans of a rank on a track."""
    layout = timeline.find_rank(rank).layout
    lanes = [lane for lane, one in enumerate(layout.lanes) if one.track is track]
    spans = layout.index.spans
    own = np.isin(spans.lane, lanes)
    return spans.where(own if look is None else own & (spans.look == LOOKS.index(look)))


def test_each_rank_has_issues_clock_collectives_and_memory_in_that_order(timeline):
    lanes = [(lane.rank, lane.track, lane.row) for lane in timeline.lanes]
    tracks = (
        Track.ISSUE,
        Track.CLOCK,
        Track.ALL_GATHER,
        Track.REDUCE_SCATTER,
        Track.MEMORY,
    )
    assert lanes == [(rank, track, 0) for rank in (0, 1) for track in tracks]


def test_host_stops_have_a_lane_below_the_clock():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    rank.add(EventKind.GARBAGE_COLLECTION, 100, 200)
    rank.add(EventKind.COMPILATION, 300, 700)
    rank.add(EventKind.DEVICE_ALLOCATION, 800, 800, flags=EventFlag.LATEST_END)
    drawn = build_timeline(builder.build(), step=0, ranks=[0])
    assert [lane.track for lane in drawn.lanes] == [Track.CLOCK, Track.HOST_STOP]
    spans = spans_of(drawn, 0, Track.HOST_STOP)
    assert [LOOKS[look].label for look in spans.look.tolist()] == [
        "garbage collection",
        "compilation",
        "device allocation",
    ]
    assert list(zip(spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True)) == [
        (100, 200),
        (300, 700),
        (800, 800),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_clock_lane_adds_up_to_the_breakdown_of_the_step(run, timeline, rank):
    breakdown = measure_step_breakdown(run, rank=rank, step=3)
    for part in StepPart:
        if part in palette.PART_LOOKS and part < StepPart.OTHER:
            drawn = spans_of(timeline, rank, Track.CLOCK, palette.PART_LOOKS[part])
            assert (drawn.end_ns - drawn.start_ns).sum() == breakdown.duration_ns(part), part.label


def test_the_root_is_seen_only_where_no_nested_unit_runs(timeline):
    forward = spans_of(timeline, 0, Track.CLOCK, palette.FORWARD)
    units = timeline.find_rank(0).events.unit[forward.event]
    assert set(units.tolist()) == set(range(10))
    seen_ns = forward.end_ns - forward.start_ns
    assert seen_ns[units == 0].sum() < seen_ns[units == 1].sum()


def test_the_axis_begins_with_the_earliest_rank_and_ends_with_the_latest(timeline):
    assert min(window.start_ns for window in timeline.windows) == 0
    assert timeline.end_ns == max(window.end_ns for window in timeline.windows)
    for drawn in timeline.ranks:
        spans = drawn.layout.index.spans
        assert spans.start_ns.min() + drawn.shift_ns >= 0
        assert spans.end_ns.max() + drawn.shift_ns <= timeline.end_ns


def test_lanes_and_events_are_numbered_through_over_the_ranks(timeline):
    first, second = timeline.ranks
    assert (second.first_lane, second.first_event) == (len(first.layout.lanes), len(first.events))
    assert timeline.num_events == len(first.events) + len(second.events)
    for drawn in timeline.ranks:
        for own in (0, len(drawn.events) - 1):
            assert timeline.rank_of(drawn.first_event + own) is drawn
    assert timeline.find_rank(7) is None


def test_exposed_time_of_the_events_adds_up_to_that_of_the_summary(run, timeline):
    layout = timeline.find_rank(0).layout
    gathers = layout.events.kind == EventKind.ALL_GATHER
    breakdown = measure_step_breakdown(run, rank=0, step=3)
    assert layout.exposed_ns[gathers].sum() == breakdown.duration_ns(StepPart.EXPOSED_ALL_GATHER)


def test_collectives_that_overlap_in_a_lane_are_stacked(run):
    events = run.tables[0]
    gathers = np.flatnonzero((events.kind == EventKind.ALL_GATHER) & (events.step == 3))
    events.start_ns[gathers[1]] = events.start_ns[gathers[0]] + 1
    timeline = build_timeline(run, step=3, ranks=[0])
    rows = [lane.row for lane in timeline.lanes if lane.track is Track.ALL_GATHER]
    assert rows == [0, 1]


def test_every_collective_has_a_mark_where_the_host_issued_it(timeline):
    marks = spans_of(timeline, 0, Track.ISSUE)
    assert len(marks) == 19 + 10
    moved_ns = marks.start_ns - timeline.find_rank(0).events.issue_ns[marks.event]
    assert set(moved_ns.tolist()) == {0, 1}
    assert (marks.look == LOOKS.index(palette.ALL_GATHER)).sum() == 19


def test_collectives_issued_at_one_moment_are_marked_side_by_side(run):
    events = run.events(0, steps=[3])
    gathers = np.flatnonzero(events.kind == EventKind.ALL_GATHER)
    events.issue_ns[gathers[:3]] = events.issue_ns[gathers[2]]
    marks = spans_of(draw_events(events, rank=0), 0, Track.ISSUE)
    assert np.diff(marks.start_ns).min() == 1


def test_a_step_is_drawn_from_its_events_alone(run, timeline):
    drawn = draw_events(run.events(0), rank=0, step=3)
    [alone], recorded = drawn.ranks, timeline.find_rank(0)
    assert drawn.step == 3
    assert drawn.refusals == {}
    np.testing.assert_array_equal(alone.layout.exposed_ns, recorded.layout.exposed_ns)
    assert draw_events(run.events(0), rank=0).step == 5


def test_events_without_the_step_are_refused_with_those_there_are(run):
    with pytest.raises(IncompleteRunError, match=r"no finished step 9 to draw.*\[0, 1, 2, 3"):
        draw_events(run.events(0), rank=0, step=9)
    with pytest.raises(IncompleteRunError, match="Finished: none"):
        draw_events(EventTable.empty(), rank=0)


def test_an_unfinished_step_is_refused_with_a_remedy(run):
    with pytest.raises(IncompleteRunError, match="Step 99 is not finished on ranks 0-1"):
        build_timeline(run, step=99, ranks=[0, 1])


def test_clocks_of_one_host_are_compared_as_they_are(timeline):
    assert timeline.clock_uncertainty_ns == 2 * 1_500


def test_clocks_of_several_hosts_are_compared_through_the_collectives_they_share():
    timeline = build_timeline(make_run(num_ranks=4), step=3, ranks=[0, 3])
    assert 2 * 1_500 < timeline.clock_uncertainty_ns < 5_000_000
    assert timeline.refusals == {}


def test_a_rank_whose_clock_cannot_be_aligned_begins_at_0_and_says_why():
    run = make_run(num_ranks=4)
    for rank in (2, 3):  # both ranks of the second host
        run.tables[rank].sequence[:] = -1
    timeline = build_timeline(run, step=3, ranks=[0, 3])
    assert "it shares no collective with an aligned rank" in timeline.refusals[3]
    assert timeline.windows[1].start_ns == 0


def test_a_single_rank_has_no_clock_uncertainty(run):
    assert build_timeline(run, step=3, ranks=[1]).clock_uncertainty_ns == 0


def test_kernels_of_an_unknown_phase_are_drawn():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    rank.add(EventKind.COMPUTE, 100, 400)
    rank.add(EventKind.COMPUTE, 600, 900)
    spans = spans_of(build_timeline(builder.build(), step=0, ranks=[0]), 0, Track.CLOCK)
    assert list(zip(spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True)) == [
        (100, 400),
        (600, 900),
    ]
    assert {LOOKS[look] for look in spans.look.tolist()} == {palette.OTHER}
