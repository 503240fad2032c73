import pytest

from fsdp_inspect.analysis.breakdown import measure_breakdown, measure_step_breakdown
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventKind, StepPart
from tests.builders import STEADY_PARTS, RunBuilder, steady_run


def test_the_headline_names_every_part_of_the_median_step():
    headline = measure_breakdown(steady_run()).headline
    assert {part.name: part.duration_ns for part in headline.parts} == STEADY_PARTS
    assert (headline.rank, headline.step, headline.step_time_ns) == (0, 1, 1000)


def test_shares_add_up_to_one():
    headline = measure_breakdown(steady_run()).headline
    assert sum(part.ratio for part in headline.parts) == pytest.approx(1)


def test_the_exposed_parts_are_the_exposed_communication():
    headline = measure_breakdown(steady_run()).headline
    assert (headline.exposed_ns, headline.communication_ns) == (250, 500)


def test_every_rank_shows_its_own_median_step():
    builder = RunBuilder(world_size=2)
    for rank, durations in enumerate([(10, 20, 30), (30, 10, 20)]):
        start = 0
        for step, duration in enumerate(durations):
            builder.rank(rank).step(step, start, start + duration)
            start += duration
    ranks = measure_breakdown(builder.build()).ranks
    assert [(row.rank, row.step) for row in ranks] == [(0, 1), (1, 2)]


def test_a_given_step_is_split_even_in_warmup():
    split = measure_step_breakdown(steady_run(warmup_steps=2), rank=1, step=0)
    assert (split.rank, split.step, split.duration_ns(StepPart.OPTIMIZER)) == (1, 0, 100)


def test_evaluation_between_steps_is_shown_beside_the_step():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.add(EventKind.BETWEEN_STEPS, 0, 30)
    headline = measure_breakdown(builder.build()).headline
    assert (headline.step_time_ns, headline.between_ns) == (70, 30)


def test_a_step_that_the_rank_did_not_finish_is_refused_with_those_it_did():
    with pytest.raises(IncompleteRunError, match=r"Step 9 not found.*0 to 3.*Choose"):
        measure_step_breakdown(steady_run(), rank=0, step=9)


def test_a_rank_without_steps_is_refused():
    with pytest.raises(IncompleteRunError, match="Completed steps: none"):
        measure_step_breakdown(steady_run(), rank=7, step=0)


def test_a_run_without_a_timed_step_has_no_headline():
    assert measure_breakdown(RunBuilder().build()).headline is None
