import pytest

from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.errors import IncompleteRunError, MissingDataError
from tests.builders import RunBuilder, steady_run


def test_everything_about_a_rank_is_of_the_same_rank():
    digest = measure_rank_waits(steady_run(), rank=1)
    answers = (digest.exposed, digest.prefetch, digest.bandwidth, digest.contention)
    assert {answer.rank for answer in answers} == {1}
    assert digest.num_timed_steps == 3
    assert "step 0 (warm-up)" in digest.left_out


def test_one_unit_limits_every_answer_but_the_ranks_own_numbers():
    digest = measure_rank_waits(steady_run(), unit="layers.1")
    assert digest.unit == "layers.1"
    assert {owner.fqn for owner in digest.exposed.owners} == {"layers.1"}
    assert {wait.fqn for wait in digest.exposed.evidence} == {"layers.1"}
    assert {row.fqn for row in digest.prefetch.units} == {"layers.1"}
    assert {row.fqn for row in digest.contention.units} == {"layers.1"}
    assert [row.num_events for row in digest.bandwidth.kinds] == [6, 3]
    assert digest.exposed.exposed_ns == 250


def test_the_root_is_asked_for_by_the_name_that_it_is_shown_by():
    builder = RunBuilder(("", "layers.0"), world_size=1)
    builder.rank(0).step(0, 0, 100)
    builder.rank(0).all_gather("", 0, 10, need=0)
    for name in ("(root)", ""):
        digest = measure_rank_waits(builder.build(), unit=name)
        assert [(owner.fqn, owner.exposed_ns) for owner in digest.exposed.owners] == [("", 10)]


def test_a_unit_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(MissingDataError, match=r"Unit 'layer\.1' not found.* Nearest: 'layers\.1'"):
        measure_rank_waits(steady_run(), unit="layer.1")


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 7 not found"):
        measure_rank_waits(steady_run(), rank=7)


def test_a_run_without_a_timed_step_has_no_answers():
    digest = measure_rank_waits(RunBuilder().build())
    assert (digest.exposed, digest.prefetch, digest.bandwidth) == (None, None, None)
    assert digest.arrivals is None


def test_how_far_stragglers_are_known_is_said():
    alone = RunBuilder(world_size=1)
    alone.rank(0).step(0, 0, 100)
    assert "one rank" in measure_rank_waits(alone.build()).arrivals.sentence
    apart = measure_rank_waits(steady_run()).arrivals
    assert (apart.num_ranks, apart.num_refused, apart.uncertainty_ns) == (1, 1, None)
    assert apart.sentence.startswith("Waits for stragglers are unknown. ")
