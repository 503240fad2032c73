"""The data for a window is exact, and small for any number of spans."""

import time
from itertools import pairwise

import numpy as np
import pytest
from fsdp_inspect_app.timeline.lod import (
    FULL,
    MAX_RECTANGLES,
    NUM_SHADES,
    OnAxis,
    SpanIndex,
    View,
    draw,
)
from fsdp_inspect_app.timeline.spans import Spans
from hypothesis import given, strategies as st

NUM_LANES = 40
SPANS_PER_LANE = 25_000


def index_of(lane, look, start, end):
    columns = zip((np.int32, np.int8, np.int64, np.int64), (lane, look, start, end), strict=True)
    events = np.arange(len(lane), dtype=np.int32)
    return SpanIndex(Spans(*(np.asarray(column, dtype) for dtype, column in columns), events))


def make_index(spans):
    return index_of(*(zip(*spans, strict=True) if spans else ((), (), (), ())))


def draw_alone(index, view, **limits):
    [drawing] = draw([OnAxis(index)], view, **limits)
    return drawing


@pytest.fixture(scope="module")
def million():
    """A million spans in 40 lanes, 10 us apart, 6 us long."""
    start = np.tile(np.arange(SPANS_PER_LANE, dtype=np.int64) * 10_000, NUM_LANES)
    lane = np.repeat(np.arange(NUM_LANES), SPANS_PER_LANE)
    return index_of(lane, lane % 3, start, start + 6_000)


def test_few_spans_are_sent_as_they_are():
    index = make_index([(0, 1, 0, 5), (0, 2, 5, 9), (1, 1, 2, 3)])
    drawing = draw_alone(index, View(0, 10, 100))
    assert drawing.is_exact
    assert drawing.start_ns.tolist() == [0, 5, 2]
    assert drawing.look.tolist() == [1, 2, 1]
    assert drawing.span.tolist() == [0, 1, 2]
    assert set(drawing.shade.tolist()) == {FULL}


def test_only_spans_that_meet_the_window_are_sent():
    index = make_index([(0, 0, 0, 5), (0, 0, 5, 9), (0, 0, 9, 12), (1, 0, 20, 30)])
    assert draw_alone(index, View(5, 9, 100)).span.tolist() == [1]


def test_an_empty_index_draws_nothing():
    assert len(draw_alone(make_index([]), View(0, 10, 100)).lane) == 0


def test_a_million_spans_become_a_few_columns_of_the_right_darkness(million):
    drawing = draw_alone(million, View(0, SPANS_PER_LANE * 10_000, 1_000))
    assert not drawing.is_exact
    assert len(drawing.lane) == NUM_LANES  # every column is equally busy: one run per lane
    assert set(drawing.shade.tolist()) == {9 * FULL // NUM_SHADES}  # 6 us of 10 us
    assert drawing.span.tolist() == [-1] * NUM_LANES


@pytest.mark.study
def test_a_million_spans_are_answered_while_one_zooms(million):
    """Processor time, so that other load on the machine does not count."""
    spent = []
    for zoom in range(4):
        started = time.process_time()
        draw_alone(million, View(0, SPANS_PER_LANE * 10_000 >> zoom, 1_600))
        spent.append(time.process_time() - started)
    assert min(spent) < 1.0


def test_what_is_sent_is_bounded_however_unlike_the_columns_are():
    random = np.random.default_rng(0)
    start = np.tile(np.arange(10_000, dtype=np.int64) * 10_000, 16)
    length = random.integers(1_000, 10_000, len(start))
    lane, look = np.repeat(np.arange(16), 10_000), random.integers(0, 5, len(start))
    index = index_of(lane, look, start, start + length)
    drawing = draw_alone(index, View(0, 100_000_000, 4_000))
    assert 30_000 < len(drawing.lane) <= MAX_RECTANGLES


def test_zooming_into_a_million_spans_shows_single_ones(million):
    drawing = draw_alone(million, View(1_000_000, 3_000_000, 1_600))
    assert drawing.is_exact
    assert len(drawing.lane) == NUM_LANES * 200


@st.composite
def lanes_of_spans(draw):
    spans = []
    for lane in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(0, 60), max_size=10)))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            spans.append((lane, draw(st.integers(0, 2)), start, end))
    return spans


@given(spans=lanes_of_spans(), width=st.integers(1, 12))
def test_shades_are_what_counting_every_nanosecond_gives(spans, width):
    drawing = draw_alone(make_index(spans), View(0, 60, width), max_spans=0)
    edges = np.linspace(0, 60, width + 1).astype(int)
    for lane in range(3):
        for look in range(3):
            for low, high in pairwise(edges):
                busy = sum(
                    start <= instant < end
                    for instant in range(low, high)
                    for its_lane, its_look, start, end in spans
                    if (its_lane, its_look) == (lane, look)
                )
                expected = -(-busy * NUM_SHADES // (high - low)) * (FULL // NUM_SHADES)
                assert shade_at(drawing, lane, look, low) == expected


def shade_at(drawing, lane, look, instant):
    here = (drawing.lane == lane) & (drawing.look == look)
    here &= (drawing.start_ns <= instant) & (instant < drawing.end_ns)
    return int(drawing.shade[here].sum())


@given(spans=lanes_of_spans(), shift=st.integers(-30, 30), max_spans=st.sampled_from([0, 100]))
def test_ranks_on_clocks_of_their_own_are_drawn_as_on_one(spans, shift, max_spans):
    """Moving the spans of a rank and moving their drawing are the same."""
    moved = [(lane, look, start + shift, end + shift) for lane, look, start, end in spans]
    members = [OnAxis(make_index(moved), -shift), OnAxis(make_index(spans))]
    here, there = draw(members, View(5, 40, 7), max_spans=max_spans)
    for name in ("lane", "look", "start_ns", "end_ns", "shade", "span"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name), name)
    assert here.is_exact == there.is_exact


def test_ranks_share_what_may_be_sent():
    one = make_index([(0, 0, start, start + 1) for start in range(0, 60, 2)])
    view = View(0, 60, 100)
    assert draw_alone(one, view, max_spans=40).is_exact
    assert not any(drawing.is_exact for drawing in draw([OnAxis(one)] * 2, view, max_spans=40))


def test_overlapping_spans_of_a_lane_are_refused_with_their_place():
    with pytest.raises(ValueError, match=r"Span 1 \(3 to 9 ns in lane 0\).*paint or stack"):
        make_index([(0, 0, 0, 5), (0, 0, 3, 9)])


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="10 to 10 ns on 100 px"):
        draw_alone(make_index([(0, 0, 0, 5)]), View(10, 10, 100))


def test_a_widened_view_stays_inside_the_axis_and_keeps_its_sharpness():
    assert View(0, 100, 1_000).widened(1_000) == View(0, 125, 1_250)
    assert View(900, 1_000, 1_000).widened(1_000) == View(875, 1_000, 1_250)
