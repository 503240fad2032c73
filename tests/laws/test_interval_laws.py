"""Compare the interval algebra with its definition: sets of nanoseconds, counted one by one."""

from hypothesis import given, strategies as st

from fsdp_inspect.trace.intervals import Intervals

TIMES = st.integers(min_value=-60, max_value=60)
PAIRS = st.lists(st.tuples(TIMES, TIMES), max_size=12)


def intervals(pairs):
    return Intervals.of([low for low, _ in pairs], [high for _, high in pairs])


def moments(pairs):
    return {time for low, high in pairs for time in range(low, high)}


def members(result):
    return moments(zip(result.starts.tolist(), result.ends.tolist(), strict=True))


def is_normalised(result):
    gaps = result.starts[1:] > result.ends[:-1]
    return bool(gaps.all()) and bool((result.ends > result.starts).all())


@given(PAIRS)
def test_a_set_holds_exactly_the_moments_of_its_intervals(pairs):
    result = intervals(pairs)
    assert members(result) == moments(pairs)
    assert result.duration_ns == len(moments(pairs))
    assert is_normalised(result)


@given(PAIRS, PAIRS)
def test_operations_are_those_of_sets(first, second):
    one, two = intervals(first), intervals(second)
    assert members(one.union(two)) == moments(first) | moments(second)
    assert members(one.intersect(two)) == moments(first) & moments(second)
    assert members(one.subtract(two)) == moments(first) - moments(second)


@given(PAIRS, PAIRS)
def test_every_result_is_normalised(first, second):
    one, two = intervals(first), intervals(second)
    assert all(map(is_normalised, (one.union(two), one.intersect(two), one.subtract(two))))


@given(PAIRS, PAIRS)
def test_intersection_and_difference_split_a_set(first, second):
    one, two = intervals(first), intervals(second)
    parts = one.intersect(two).duration_ns + one.subtract(two).duration_ns
    assert parts == one.duration_ns


@given(PAIRS, st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=8))
def test_covered_time_is_the_number_of_shared_moments(pairs, queries):
    covered = intervals(pairs).covered_ns(*map(list, zip(*queries, strict=True)))
    expected = [len(moments(pairs) & set(range(low, high))) for low, high in queries]
    assert covered.tolist() == expected


@given(PAIRS, TIMES)
def test_splitting_an_interval_in_two_changes_no_union(pairs, cut):
    halves = [
        half
        for low, high in pairs
        for half in ([(low, cut), (cut, high)] if low <= cut <= high else [(low, high)])
    ]
    assert members(intervals(halves)) == members(intervals(pairs))
    assert intervals(halves).duration_ns == intervals(pairs).duration_ns
