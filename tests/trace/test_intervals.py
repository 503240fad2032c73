from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.trace.intervals import Intervals


def spans(*pairs):
    return Intervals.of([low for low, _ in pairs], [high for _, high in pairs])


def pairs(intervals):
    return list(zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True))


def test_overlapping_and_touching_intervals_become_one():
    assert pairs(spans((10, 20), (0, 5), (15, 30), (30, 40))) == [(0, 5), (10, 40)]


def test_an_interval_inside_another_adds_nothing():
    assert pairs(spans((0, 100), (10, 20), (50, 60))) == [(0, 100)]


def test_empty_and_reversed_intervals_are_dropped():
    assert pairs(spans((5, 5), (9, 3))) == []


def test_two_lengths_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="same length, got 2 and 1"):
        Intervals.of([0, 1], [2])


def test_duration_counts_an_overlap_once():
    assert spans((0, 10), (5, 15)).duration_ns == 15


def test_intersection_keeps_what_lies_in_both():
    common = spans((0, 10), (20, 30)).intersect(spans((5, 25), (28, 29)))
    assert pairs(common) == [(5, 10), (20, 25), (28, 29)]


def test_half_open_neighbours_do_not_meet():
    assert pairs(spans((0, 10)).intersect(spans((10, 20)))) == []


def test_subtraction_leaves_the_gaps():
    assert pairs(spans((0, 100)).subtract(spans((10, 20), (90, 200)))) == [(0, 10), (20, 90)]


def test_subtracting_nothing_changes_nothing():
    assert pairs(spans((3, 4)).subtract(Intervals.empty())) == [(3, 4)]


def test_union_of_two_sets_is_normalised():
    assert pairs(spans((0, 10)).union(spans((10, 20), (30, 40)))) == [(0, 20), (30, 40)]


def test_clip_cuts_at_both_ends():
    assert pairs(spans((0, 10), (20, 30)).clip(5, 25)) == [(5, 10), (20, 25)]


def test_covered_time_of_each_query_is_counted_on_its_own():
    covered = spans((10, 20), (30, 40)).covered_ns([0, 15, 20, 35, 50], [50, 35, 30, 35, 40])
    assert covered.tolist() == [20, 10, 0, 0, 0]


def test_the_empty_set_covers_nothing():
    assert Intervals.empty().covered_ns([0], [100]).tolist() == [0]
    assert Intervals.empty().covered_between([0, 100]).tolist() == [0]
    assert Intervals.empty().holds([0, 100]).tolist() == [False, False]
    assert Intervals.empty().duration_ns == 0


any_spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(given_spans=any_spans)
def test_a_set_holds_the_instants_of_its_members(given_spans):
    held = [any(low <= now < high for low, high in given_spans) for now in range(-1, 32)]
    assert spans(*given_spans).holds(range(-1, 32)).tolist() == held


@given(given_spans=any_spans, edges=st.lists(st.integers(-2, 32), min_size=1).map(sorted))
def test_what_lies_between_edges_is_counted_from_each_to_the_next(given_spans, edges):
    covered = spans(*given_spans)
    expected = [int(covered.covered_ns([low], [high])[0]) for low, high in pairwise(edges)]
    assert covered.covered_between(edges).tolist() == expected


@given(given_spans=any_spans)
def test_the_order_in_which_intervals_are_given_does_not_matter(given_spans):
    assert pairs(spans(*given_spans)) == pairs(spans(*sorted(given_spans)))


def test_times_of_a_wall_clock_stay_exact():
    epoch = 1_790_000_000_000_000_001
    assert spans((epoch, epoch + 3), (epoch + 2, epoch + 7)).duration_ns == 7
    assert spans((epoch, epoch + 3)).starts.dtype == np.int64
