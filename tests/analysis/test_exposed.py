import pytest

from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import Phase
from tests.builders import STEADY_FLOOR_NS, RunBuilder, steady_run

BACKWARD = Phase.BACKWARD


def one_step():
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)
    return builder, builder.rank(0)


def owners_of(run):
    return {
        (owner.fqn, owner.kind, owner.phase): (owner.exposed_ns, owner.floor_ns)
        for owner in measure_exposed(run).owners
    }


def test_every_wait_belongs_to_the_unit_whose_collective_is_waited_for():
    assert owners_of(steady_run()) == {
        ("layers.0", "reduce_scatter", "backward"): (100, 100),
        ("layers.0", "all_gather", "forward"): (50, 50),
        ("layers.1", "all_gather", "forward"): (50, 0),
        ("layers.1", "all_gather", "backward"): (30, 0),
        (None, "all_reduce", "backward"): (20, 0),
        ("layers.0", "all_gather", "backward"): (0, 0),
        ("layers.1", "reduce_scatter", "backward"): (0, 0),
    }


def test_the_longest_wait_comes_first():
    exposed = [owner.exposed_ns for owner in measure_exposed(steady_run()).owners]
    assert exposed == sorted(exposed, reverse=True)


def test_the_kinds_are_told_apart():
    exposed = measure_exposed(steady_run())
    assert exposed.by_kind_ns == {
        "all_gather": 130,
        "reduce_scatter": 100,
        "all_reduce": 0,
        "other": 20,
    }


def test_the_floor_is_the_first_gather_and_the_last_reduction():
    assert measure_exposed(steady_run()).floor_ns == STEADY_FLOOR_NS


def test_every_microbatch_has_a_floor_of_its_own():
    builder, rank = one_step()
    for microbatch, start in enumerate((0, 50)):
        rank.all_gather("layers.0", start, start + 10, need=start, microbatch=microbatch)
        rank.all_gather("layers.1", start + 20, start + 25, need=start + 20, microbatch=microbatch)
    assert measure_exposed(builder.build()).floor_ns == 20


def test_under_hsdp_the_last_reduction_is_the_all_reduce():
    builder, rank = one_step()
    rank.reduce_scatter("layers.0", 50, 60, need=50)
    rank.all_reduce("layers.0", 60, 90, need=60)
    assert measure_exposed(builder.build()).floor_ns == 30


def test_communication_that_is_not_fsdps_is_no_floor():
    builder, rank = one_step()
    rank.all_reduce(None, 60, 90, need=60)
    exposed = measure_exposed(builder.build())
    assert (exposed.exposed_ns, exposed.floor_ns) == (30, 0)


def test_backward_gathers_are_what_keeping_parameters_would_save():
    assert measure_exposed(steady_run()).backward_gathers_ns == 30


def test_another_rank_can_be_asked_for():
    builder = RunBuilder(world_size=2)
    for number, waited in enumerate((10, 70)):
        builder.rank(number).step(0, 0, 100)
        builder.rank(number).all_gather("layers.0", 0, waited, need=0)
    run = builder.build()
    assert measure_exposed(run).exposed_ns == 10
    assert measure_exposed(run, rank=1).exposed_ns == 70


def test_a_rank_without_a_timed_step_has_no_exposure():
    assert measure_exposed(steady_run(num_steps=1), rank=1) is None
    assert measure_exposed(RunBuilder().build()) is None


def test_a_rank_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(IncompleteRunError, match=r"nothing of rank 9.*the ranks 0-3\. Choose"):
        measure_exposed(steady_run(world_size=4), rank=9)
