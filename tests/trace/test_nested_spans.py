"""Flattened spans show the span that began last, at every instant."""

import numpy as np
from hypothesis import given, strategies as st

from fsdp_inspect.trace.intervals import Intervals, paint_innermost, stack_rows

HORIZON = 40
SPANS = st.lists(
    st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)).map(
        lambda pair: (min(pair), max(pair))
    ),
    max_size=8,
)


def arrays(spans):
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    ends = np.array([end for _, end in spans], dtype=np.int64)
    return starts, ends


def everywhere():
    return Intervals.of([0], [HORIZON])


def test_nested_span_covers_its_parent_while_it_runs():
    starts, ends = arrays([(0, 10), (2, 5)])
    painted = paint_innermost(starts, ends, everywhere())
    pieces = list(zip(painted.starts, painted.ends, painted.span, strict=True))
    assert pieces == [(0, 2, 0), (2, 5, 1), (5, 10, 0)]


def test_what_lies_outside_the_given_set_is_cut_away():
    starts, ends = arrays([(0, 10)])
    painted = paint_innermost(starts, ends, Intervals.of([3, 8], [4, 20]))
    pieces = list(zip(painted.starts, painted.ends, painted.span, strict=True))
    assert pieces == [(3, 4, 0), (8, 10, 0)]


def test_nothing_is_painted_from_no_spans():
    starts, ends = arrays([])
    assert len(paint_innermost(starts, ends, everywhere()).span) == 0


@given(spans=SPANS, allowed=SPANS)
def test_every_instant_shows_the_latest_running_span(spans, allowed):
    starts, ends = arrays(spans)
    within = Intervals.of(*arrays(allowed))
    painted = paint_innermost(starts, ends, within)
    for instant in range(HORIZON):
        running = [
            span
            for span in range(len(spans))
            if starts[span] <= instant < ends[span]
            and within.covered_ns([instant], [instant + 1])[0]
        ]
        shown = painted.span[(painted.starts <= instant) & (instant < painted.ends)]
        if not running:
            assert len(shown) == 0
        else:
            assert len(shown) == 1
            latest = max(running, key=lambda span: (starts[span], -ends[span]))
            assert (starts[shown[0]], ends[shown[0]]) == (starts[latest], ends[latest])


def test_overlapping_spans_get_rows_of_their_own_and_later_ones_reuse_the_lowest():
    starts, ends = arrays([(0, 10), (5, 20), (10, 12), (11, 13)])
    assert stack_rows(starts, ends).tolist() == [0, 1, 0, 2]


@given(spans=SPANS)
def test_spans_of_one_row_never_overlap(spans):
    starts, ends = arrays([span for span in spans if span[0] < span[1]])
    rows = stack_rows(starts, ends)
    for row in set(rows.tolist()):
        own = np.flatnonzero(rows == row)
        own = own[np.argsort(starts[own], kind="stable")]
        assert np.all(starts[own][1:] >= ends[own][:-1])
