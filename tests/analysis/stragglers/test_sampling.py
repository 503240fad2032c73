"""Sampled ranks and steps represent the run."""

from fsdp_inspect.analysis.step_selection import timed_ranks
from fsdp_inspect.analysis.stragglers.rank_work import (
    common_steps,
    consecutive,
    sample_ranks,
    spread,
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


def test_consecutive_steps_are_from_the_middle_of_the_longest_stretch():
    assert consecutive([0, 1, 5, 6, 7, 8, 9, 10, 20], 2) == [7, 8]
    assert consecutive([], 2) == []
