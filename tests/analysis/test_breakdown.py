import pytest

from fsdp_inspect.analysis.breakdown import measure_breakdown, measure_step_breakdown
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventKind, StepPart
from tests.builders import STEADY_PARTS, RunBuilder, steady_run


def test_the_headline_names_every_part_of_the_typical_step():
    headline = measure_breakdown(steady_run()).headline
    assert {part.name: part.duration_ns for part in headline.parts} == STEADY_PARTS
    assert (headline.rank, headline.steps, headline.step_time_ns) == (0, (1, 2, 3), 1000)
    assert headline.closest_step == 1


def test_shares_add_up_to_one():
    headline = measure_breakdown(steady_run()).headline
    assert sum(part.ratio for part in headline.parts) == pytest.approx(1)


def test_the_exposed_parts_are_the_exposed_communication():
    headline = measure_breakdown(steady_run()).headline
    assert (headline.exposed_ns, headline.communication_ns) == (250, 500)


def test_every_rank_shows_its_own_typical_step():
    builder = RunBuilder(world_size=2)
    for rank, durations in enumerate([(10, 20, 40, 24), (80, 10, 30, 25)]):
        start = 0
        for step, duration in enumerate(durations):
            builder.rank(rank).step(step, start, start + duration)
            start += duration
    ranks = measure_breakdown(builder.build()).ranks
    # Rank 0: (20 + 24) / 2; rank 1: (30 + 25) / 2 = 27.5, rounded half to even.
    assert [(row.rank, row.steps, row.step_time_ns) for row in ranks] == [
        (0, (1, 3), 22),
        (1, (2, 3), 28),
    ]
    assert [row.closest_step for row in ranks] == [1, 2]


def test_parts_of_several_steps_are_rounded_so_that_they_add_up():
    builder = RunBuilder(world_size=1)
    start = 0
    for step, (forward, optimizer) in enumerate(((10, 5), (10, 6), (11, 6))):
        rank = builder.rank(0)
        rank.step(step, start, start + forward + optimizer)
        rank.forward("layers.0", start, start + forward)
        rank.add(EventKind.OPTIMIZER, start + forward, start + forward + optimizer)
        start += forward + optimizer
    headline = measure_breakdown(builder.build()).headline
    # Step time (15 + 16 + 17) / 3 = 16; forward 31 / 3 = 10.33; optimizer 17 / 3 = 5.67.
    assert headline.step_time_ns == 16
    assert headline.duration_ns(StepPart.FORWARD) == 10
    assert headline.duration_ns(StepPart.OPTIMIZER) == 6


def test_a_given_step_is_split_even_in_warmup():
    split = measure_step_breakdown(steady_run(warmup_steps=2), rank=1, step=0)
    assert (split.rank, split.steps, split.duration_ns(StepPart.OPTIMIZER)) == (1, (0,), 100)


def test_evaluation_between_steps_is_shown_beside_the_step():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.add(EventKind.BETWEEN_STEPS, 0, 30)
    headline = measure_breakdown(builder.build()).headline
    assert (headline.step_time_ns, headline.between_ns) == (70, 30)


def test_the_time_between_steps_is_the_mean_over_all_steps():
    builder = RunBuilder(world_size=1)
    rank, now = builder.rank(0), 0
    for step in range(40):
        is_evaluated = step % 10 == 5
        end = now + 100 + 400 * is_evaluated
        rank.step(step, now, end, is_plain=step >= 10)
        if is_evaluated:
            rank.add(EventKind.BETWEEN_STEPS, now, now + 400)
        now = end
    headline = measure_breakdown(builder.build()).headline
    assert (headline.step_time_ns, headline.between_ns) == (100, 40)


def test_a_step_that_the_rank_did_not_finish_is_refused_with_those_it_did():
    with pytest.raises(IncompleteRunError, match=r"Step 9 not found.*0 to 3.*Choose"):
        measure_step_breakdown(steady_run(), rank=0, step=9)


def test_a_rank_without_steps_is_refused():
    with pytest.raises(IncompleteRunError, match="Completed steps: none"):
        measure_step_breakdown(steady_run(), rank=7, step=0)


def test_a_run_without_a_timed_step_has_no_headline():
    assert measure_breakdown(RunBuilder().build()).headline is None
