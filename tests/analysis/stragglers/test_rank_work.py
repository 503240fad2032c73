"""Ranks that work longer, separated from chance."""

from itertools import product

import numpy as np
import pytest

from fsdp_inspect.analysis.step_selection import RankSteps
from fsdp_inspect.analysis.stragglers.rank_work import (
    MAX_CHANCE,
    RankWork,
    chance_of_most,
    steps_to_tell,
)


def member(rank, works, first_step=0):
    numbers = np.arange(first_step, first_step + len(works))
    none = np.zeros(len(works), dtype=np.int64)
    step_time = np.full(len(works), 1000)
    is_typical = np.ones(len(works), dtype=bool)
    return RankSteps(
        rank, numbers, step_time, step_time - works, none, none, none, lambda: None, is_typical
    )


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(2, 5), (3, 4), (4, 3)])
def test_no_outcome_of_equal_ranks_is_likelier_than_its_chance_says(num_ranks, num_steps):
    outcomes = list(product(range(num_ranks), repeat=num_steps))
    most = np.array([max(outcome.count(rank) for rank in range(num_ranks)) for outcome in outcomes])
    for wins in range(1, num_steps + 1):
        share = np.count_nonzero(most >= wins) / len(outcomes)
        assert share <= chance_of_most(wins, num_steps, num_ranks) + 1e-12


def test_chance_is_exact_where_a_rank_is_the_longest_in_every_step():
    assert chance_of_most(1, 1, 2) == 1
    assert chance_of_most(4, 4, 2) == pytest.approx(2 / 16)
    assert chance_of_most(3, 3, 8) == pytest.approx(8 / 512)


@pytest.mark.parametrize(("num_ranks", "steps"), [(2, 6), (3, 4), (4, 4), (8, 3), (64, 2)])
def test_few_ranks_need_more_steps(num_ranks, steps):
    members = [member(rank, [100 - (rank > 0)]) for rank in range(num_ranks)]
    assert steps_to_tell(RankWork(members), 0) == f"at least {steps} timed steps"
    assert chance_of_most(steps - 1, steps - 1, num_ranks) > MAX_CHANCE


def test_more_steps_are_needed_than_were_recorded():
    """One of five ranks works longest in four of five steps: four steps were not enough."""
    own = [100, 100, 100, 100, 98]
    members = [member(rank, own if rank == 0 else [99] * 5) for rank in range(2)]
    text = steps_to_tell(RankWork(members), 0)
    assert int(text.split()[2]) > 5
    half = [member(0, [100, 98]), member(1, [98, 100])]
    assert steps_to_tell(RankWork(half), 0) == "many more timed steps"


def test_equal_work_is_the_longest_of_nobody():
    work = RankWork([member(0, [100, 100]), member(1, [100, 120])])
    assert (work.num_longest(0), work.num_longest(1)) == (0, 1)


def test_steps_without_a_duration_have_no_rare_work():
    assert RankWork([member(0, [0] * 3), member(1, [0] * 3)]).find_rare(0, 0.0) is None


def test_excess_is_the_median_over_steps_against_the_middle_of_the_others():
    work = RankWork([member(0, [100] * 3), member(1, [110] * 3), member(2, [150, 900, 160])])
    assert work.excess_ns(2) == 60
    assert work.excess_ns(0) == -10


def test_only_steps_that_all_ranks_have_are_compared():
    work = RankWork([member(0, [100] * 4), member(1, [200] * 4, first_step=3)])
    assert (work.num_steps, work.num_longest(1)) == (1, 1)
