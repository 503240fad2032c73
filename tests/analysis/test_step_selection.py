from dataclasses import replace

import numpy as np

from fsdp_inspect.analysis.step_selection import (
    select_steps,
    split_by_rank,
    steps_by_rank,
    sum_per_step,
    timed_ranks,
    timed_summary,
)
from fsdp_inspect.store.reduction.run_statistics import WHOLE_STEP_KINDS
from fsdp_inspect.trace.tables import SummaryTable
from tests.builders import InMemoryRun, RunBuilder, steady_run


def run_with_exposed(*exposed):
    """One rank for each number, which is its wait in every step of 100 ns."""
    builder = RunBuilder(world_size=len(exposed))
    for rank, waited in enumerate(exposed):
        one = builder.rank(rank)
        one.step(0, 0, 100)
        one.all_gather("layers.0", 0, waited, need=0)
    return builder.build()


def chosen_rank(run):
    return timed_ranks(run).median.rank


def test_warmup_steps_are_the_first_finished_ones():
    selection = select_steps(steady_run(num_steps=5, warmup_steps=2))
    assert (selection.warmup, selection.timed) == ((0, 1), (2, 3, 4))


def test_warmup_counts_from_the_first_step_of_a_resumed_run():
    builder = RunBuilder(warmup_steps=1)
    for step in (500, 501, 502):
        builder.rank(0).step(step, step * 10, step * 10 + 10)
    assert select_steps(builder.build()).timed == (501, 502)


def test_memory_steps_are_left_out_by_flag_and_by_manifest():
    builder = RunBuilder(memory_steps=[1])
    for step in range(4):
        builder.rank(0).step(step, step * 10, step * 10 + 10, is_memory_step=step == 2)
    selection = select_steps(builder.build())
    assert (selection.memory, selection.slowed, selection.timed) == ((1,), (2,), (0, 3))


def test_what_is_left_out_is_said_in_words():
    run = steady_run(num_steps=6, warmup_steps=2, memory_steps=[4])
    assert select_steps(run).sentence == (
        "3 of 6 completed steps are timed; left out: steps 0-1 (warm-up), step 4 (memory)."
    )


def test_a_run_without_a_step_selects_nothing():
    assert select_steps(RunBuilder().build()).sentence == "0 of 0 completed steps are timed."


def test_the_median_rank_is_the_one_that_waits_as_the_middle_rank_does():
    assert chosen_rank(run_with_exposed(50, 0, 40)) == 2


def test_of_two_equal_ranks_the_one_that_waits_less_stands_for_the_run():
    assert chosen_rank(run_with_exposed(11, 10)) == 1


def test_of_two_ranks_the_one_that_waits_for_a_straggler_stands_for_the_run():
    assert chosen_rank(run_with_exposed(50, 10)) == 0


def test_no_rank_of_a_slow_half_stands_for_the_run():
    assert chosen_rank(run_with_exposed(5, 50, 4, 60)) == 1
    assert chosen_rank(run_with_exposed(49, 50, 4, 60)) == 0


def test_a_single_straggler_never_stands_for_the_run():
    assert chosen_rank(run_with_exposed(40, 41, 0, 42)) == 0


def test_no_rank_stands_for_a_run_without_steps():
    assert timed_ranks(RunBuilder().build()).median is None


def test_a_rank_whose_files_are_missing_stands_for_the_run_only_if_alone():
    run = run_with_exposed(10, 50)
    assert chosen_rank(replace(run, ranks=run.ranks[:1])) == 0
    assert chosen_rank(replace(run, ranks=())) == 1


def test_the_closest_step_is_the_earliest_of_equals():
    member = next(steps_by_rank(timed_summary(steady_run(num_steps=4, warmup_steps=1))))
    assert member.closest_step == 1


def test_a_step_without_rows_counts_zero_in_a_sum():
    sums = sum_per_step(np.array([2, 2, 7]), np.array([1, 10, 5]), np.array([2, 3, 7]))
    assert sums.tolist() == [11, 0, 5]


def test_rows_of_other_steps_are_not_in_a_sum():
    sums = sum_per_step(np.array([1, 2, 4, 9]), np.array([1, 10, 5, 7]), np.array([2, 3, 7]))
    assert sums.tolist() == [10, 0, 0]


def test_the_rows_of_each_rank_are_told_apart():
    rows = steady_run(world_size=3).summary()
    of_rank = split_by_rank(rows)
    assert list(of_rank) == [0, 1, 2]
    assert [set(own.rank.tolist()) for own in of_rank.values()] == [{0}, {1}, {2}]
    assert sum(map(len, of_rank.values())) == len(rows)
    assert split_by_rank(SummaryTable.empty()) == {}


def test_rows_of_a_rank_are_those_of_its_timed_steps():
    run = steady_run(num_steps=4, warmup_steps=1)
    [first, _] = timed_ranks(run).members
    assert set(first.rows.step.tolist()) == {1, 2, 3}
    assert set(first.rows.rank.tolist()) == {0}
    assert len(first.rows) == (timed_summary(run).rank == 0).sum()


def test_many_ranks_are_judged_without_their_units():
    asked = []

    class WatchedRun(InMemoryRun):
        def summary(self, *, ranks=None, kinds=None):
            asked.append((ranks, kinds))
            return super().summary(ranks=ranks, kinds=kinds)

    assert timed_ranks(WatchedRun(**vars(steady_run()))).median is not None
    assert all(kinds is not None and WHOLE_STEP_KINDS.issuperset(kinds) for _, kinds in asked)


def test_ranks_without_a_finished_step_are_left_out():
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 10)
    builder.rank(1).data(0, 5)
    assert [member.rank for member in steps_by_rank(timed_summary(builder.build()))] == [0]
