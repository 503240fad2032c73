import pytest

from fsdp_inspect.analysis.breakdown_causes import measure_breakdown_causes
from fsdp_inspect.errors import IncompleteRunError
from tests.builders import STEADY_PARTS, RunBuilder, steady_run


def test_by_default_the_typical_step_of_the_median_rank_is_shown():
    digest = measure_breakdown_causes(steady_run())
    assert (digest.shown.rank, digest.shown.steps, digest.is_typical) == (0, (1, 2, 3), True)
    assert {part.name: part.duration_ns for part in digest.shown.parts} == STEADY_PARTS
    assert (digest.largest.name, digest.exposed_ratio) == ("backward", 0.25)
    assert [row.rank for row in digest.ranks] == [0, 1]


def test_the_causes_are_those_of_the_shown_step_and_add_up():
    digest = measure_breakdown_causes(steady_run())
    assert digest.causes_ns == {"floor": 150, "bandwidth": 60, "late_issue": 40}
    assert list(digest.causes_ns) == ["floor", "bandwidth", "late_issue"]
    assert sum(digest.causes_ns.values()) == digest.shown.exposed_ns


def test_any_finished_step_of_any_rank_can_be_asked_for():
    digest = measure_breakdown_causes(steady_run(), rank=1, step=0)
    assert (digest.shown.rank, digest.shown.steps, digest.is_typical) == (1, (0,), False)
    assert measure_breakdown_causes(steady_run(), rank=1).shown.rank == 1
    assert not measure_breakdown_causes(steady_run(), step=1).is_typical


def test_without_a_timed_step_only_a_step_that_is_named_is_shown():
    run = steady_run(num_steps=1)
    assert measure_breakdown_causes(run).shown is None
    assert measure_breakdown_causes(run).causes_ns == {}
    assert measure_breakdown_causes(run, step=0).shown.step_time_ns == 1000


def test_what_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 7 not found"):
        measure_breakdown_causes(steady_run(), rank=7)
    with pytest.raises(IncompleteRunError, match="Step 9 not found"):
        measure_breakdown_causes(steady_run(), step=9)


def test_stragglers_are_told_where_ranks_share_a_clock():
    builder = RunBuilder(world_size=2)
    for number, start in enumerate((10, 40)):
        rank = builder.rank(number)
        rank.record["host"] = "one"
        rank.step(0, 0, 100)
        rank.all_gather("layers.0", start, 50, need=start, sequence=0, bytes=64)
    run = builder.build()
    assert measure_breakdown_causes(run, rank=0).causes_ns == {"straggler": 30, "floor": 10}
    assert measure_breakdown_causes(run, rank=1).causes_ns == {"floor": 10}
    assert "arrivals of 2 of 2 ranks" in measure_breakdown_causes(run, rank=0).arrivals.sentence
