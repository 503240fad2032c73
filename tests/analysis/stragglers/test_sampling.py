"""Sampled ranks and steps represent the run."""

from hypothesis import given, strategies as st

from fsdp_inspect.analysis.step_selection import timed_ranks
from fsdp_inspect.analysis.stragglers.rank_work import (
    common_steps,
    sample_ranks,
    spread,
    windows_of,
)
from tests.builders import steady_run


def test_few_ranks_are_all_taken():
    typical = timed_ranks(steady_run(world_size=4)).typical
    assert sample_ranks(typical, range(4), 8) == [0, 1, 2, 3]


def test_many_ranks_are_thinned_out_evenly():
    typical = timed_ranks(steady_run(world_size=12, num_steps=2)).typical
    chosen = sample_ranks(typical, range(12), 6)
    assert len(chosen) == 6
    assert {0, 1, 11} <= set(chosen)


def test_ranks_without_files_are_not_taken():
    typical = timed_ranks(steady_run(world_size=4)).typical
    assert sample_ranks(typical, [0, 3], 8) == [0, 3]


def test_common_steps_are_those_that_every_rank_finished():
    members = timed_ranks(steady_run(num_steps=5)).members
    assert common_steps(members) == [1, 2, 3, 4]
    assert common_steps([]) == []


def test_values_are_spread_from_the_first_to_the_last():
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread([5, 6], 4) == [5, 6]


def test_windows_are_consecutive_steps_spread_over_the_run():
    assert windows_of(range(40), 4, 3) == [[4, 5, 6, 7], [20, 21, 22, 23], [32, 33, 34, 35]]
    assert windows_of([0, 1, 5, 6, 7, 8, 9, 10, 20], 2, 9) == [[0, 1], [5, 6], [7, 8], [9, 10]]


def test_too_few_consecutive_steps_are_one_window():
    assert windows_of([0, 1, 5], 4, 3) == [[0, 1]]
    assert windows_of([], 4, 3) == []


@given(st.sets(st.integers(0, 60)), st.integers(1, 6), st.integers(1, 6))
def test_windows_share_no_step(chosen, length, most):
    steps = sorted(chosen)
    windows = windows_of(steps, length, most)
    flat = [step for window in windows for step in window]
    assert flat == sorted(set(flat) & chosen)
    assert len(windows) <= most
    assert all(window == list(range(window[0], window[-1] + 1)) for window in windows)
    assert not steps or windows
