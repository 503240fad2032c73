import pytest

from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import RunBuilder, steady_run


def one_step(**builder):
    built = RunBuilder(**builder)
    built.rank(0).step(0, 0, 1000)
    return built, built.rank(0)


def unit_of(run, fqn):
    return next(unit for unit in measure_units(run).units if unit.fqn == fqn)


def test_a_unit_knows_its_size_from_the_manifest():
    unit = unit_of(steady_run(), "layers.1")
    assert (unit.num_parameters, unit.unsharded_bytes, unit.param_dtype) == (100, 64, "float32")


def test_gathers_of_a_step_are_counted_and_one_is_measured():
    gather = unit_of(steady_run(), "layers.1").all_gather
    assert (gather.count_per_step, gather.bytes, gather.duration_ns) == (2, 64, 90)
    assert gather.exposed_ns == 50 + 30


def test_bus_bandwidth_counts_what_comes_from_other_ranks():
    reduce_scatter = unit_of(steady_run(world_size=4), "layers.0").reduce_scatter
    assert reduce_scatter.group_size == 4
    assert reduce_scatter.bus_bytes_per_s == pytest.approx(64 * 3 / 4 / 100e-9)


def test_all_reduce_moves_the_message_twice():
    groups = [
        ProcessGroup(index=0, name="shard", ranks=[0, 1], role="shard"),
        ProcessGroup(index=1, name="replicate", ranks=[0, 2], role="replicate"),
    ]
    builder, rank = one_step(world_size=4, process_groups=groups)
    builder.unit("layers.0", replicate_group=1)
    rank.all_reduce("layers.0", 0, 10, bytes=100)
    all_reduce = unit_of(builder.build(), "layers.0").all_reduce
    assert all_reduce.bus_bytes_per_s == pytest.approx(2 * 100 / 2 / 10e-9)


def test_a_group_of_one_rank_has_no_bandwidth():
    builder, rank = one_step(world_size=1)
    rank.all_gather("layers.0", 0, 10)
    assert unit_of(builder.build(), "layers.0").all_gather.bus_bytes_per_s is None


def test_gathers_over_the_smaller_group_of_an_integer_reshard_count_with_its_size():
    builder, rank = one_step(world_size=8)
    builder.unit("layers.0", reshard_after_forward=2)
    rank.all_gather("layers.0", 0, 10, bytes=100)
    rank.all_gather("layers.0", 20, 30, bytes=100, phase=Phase.BACKWARD)
    gather = unit_of(builder.build(), "layers.0").all_gather
    assert gather.bus_bytes_per_s == pytest.approx(100 * (7 / 8 + 1 / 2) / 2 / 10e-9)


def test_a_frozen_unit_has_no_reduce_scatter():
    builder, rank = one_step()
    rank.all_gather("layers.0", 0, 10)
    reduction = unit_of(builder.build(), "layers.0").reduce_scatter
    assert (reduction.count_per_step, reduction.bytes, reduction.duration_ns) == (0, None, None)
    assert (reduction.exposed_ns, reduction.bus_bytes_per_s) == (0, None)


def test_a_collective_missing_in_some_steps_counts_zero_there():
    builder = RunBuilder()
    rank = builder.rank(0)
    for step in range(3):
        rank.step(step, step * 100, step * 100 + 100)
    rank.all_gather("layers.0", 200, 250, need=200)
    gather = unit_of(builder.build(), "layers.0").all_gather
    assert gather.count_per_step == pytest.approx(1 / 3)
    # 50 in one step of three; the single collective took 50.
    assert (gather.exposed_ns, gather.duration_ns) == (17, 50)


def test_forward_backward_copies_and_prefetches_are_per_step():
    unit = unit_of(steady_run(), "layers.0")
    assert (unit.forward_ns, unit.backward_ns, unit.copies_ns) == (100, 160, 10)
    assert (unit.prefetched_per_step, unit.exposed_ns) == (1, 150)


def test_recomputation_is_not_a_second_forward():
    builder, rank = one_step()
    rank.forward("layers.0", 0, 100)
    again = {"unit": "layers.0", "phase": Phase.BACKWARD}
    rank.add(EventKind.FORWARD, 500, 530, flags=int(EventFlag.RECOMPUTE), **again)
    rank.add(EventKind.RECOMPUTE, 600, 605, **again)
    unit = unit_of(builder.build(), "layers.0")
    assert (unit.forward_ns, unit.recompute_ns) == (100, 35)


def test_evaluation_is_not_a_forward_of_training():
    builder, rank = one_step()
    rank.add(EventKind.FORWARD, 0, 100, unit="layers.0", phase=Phase.EVALUATION)
    rank.all_gather("layers.0", 0, 10, phase=Phase.EVALUATION)
    unit = unit_of(builder.build(), "layers.0")
    assert (unit.forward_ns, unit.all_gather.count_per_step) == (0, 0)


def test_units_come_in_order_of_execution_those_that_never_ran_last():
    builder, _ = one_step(units=("a", "b", "c"))
    builder.unit("a", execution_index=-1)
    builder.unit("b", execution_index=5)
    builder.unit("c", execution_index=2)
    units = measure_units(builder.build()).units
    assert [(unit.fqn, unit.execution_index) for unit in units] == [
        ("c", 2),
        ("b", 5),
        ("a", None),
    ]


def test_a_run_without_a_timed_step_still_lists_its_units():
    costs = measure_units(RunBuilder(units=("", "layers.0")).build())
    assert (costs.rank, costs.num_steps) == (None, 0)
    assert [unit.fqn for unit in costs.units] == ["", "layers.0"]
