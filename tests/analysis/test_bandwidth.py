import numpy as np
import pytest

from fsdp_inspect.analysis.bandwidth import measure_bandwidth
from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.analysis.wait_causes import timed_collectives
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventFlag, EventKind, Method, Phase
from tests.builders import RunBuilder, steady_run


def one_step(world_size=4):
    builder = RunBuilder(world_size=world_size)
    builder.rank(0).step(0, 0, 1000)
    return builder, builder.rank(0)


def kinds_of(run, **arguments):
    return {kind.kind: kind for kind in measure_bandwidth(run, **arguments).kinds}


def test_bandwidth_is_that_of_all_messages_by_kind_and_group():
    builder, rank = one_step()
    rank.all_gather("layers.0", 0, 100, bytes=4000)
    rank.all_gather("layers.1", 100, 200, bytes=2000)
    rank.reduce_scatter("layers.1", 300, 400, bytes=1000)
    kinds = kinds_of(builder.build())
    gather, scatter = kinds["all_gather"], kinds["reduce_scatter"]
    assert gather.algorithm_bytes_per_s == pytest.approx(6000 / 200 * 1e9)
    assert gather.bus_bytes_per_s == pytest.approx(0.75 * 6000 / 200 * 1e9)
    assert (gather.num_events, gather.num_sizes, gather.bytes_per_step) == (2, 2, 6000)
    assert (gather.group, gather.group_role, gather.group_size) == (0, "shard", 4)
    assert scatter.bus_bytes_per_s == pytest.approx(0.75 * 10e9)


def test_time_in_the_queue_is_no_transfer():
    builder, rank = one_step()
    rank.reduce_scatter("layers.1", 0, 100, bytes=1000)
    rank.all_gather("layers.0", 20, 150, bytes=1000, issue_ns=10)
    assert kinds_of(builder.build())["all_gather"].transfer_ns == 50


def test_what_all_ranks_say_of_a_transfer_replaces_this_ranks_own_times():
    run = steady_run()
    collectives = timed_collectives(run, timed_rank(run, 0))
    transfer = np.where(collectives.kind == EventKind.REDUCE_SCATTER, 40, -1)
    kinds = kinds_of(run, rank=0, transfer_ns=transfer)
    assert (kinds["reduce_scatter"].transfer_ns, kinds["reduce_scatter"].transfer_from) == (
        40,
        "all_ranks",
    )
    assert kinds["all_gather"].transfer_from == "rank"


def test_nothing_travels_in_a_group_of_one_rank():
    builder, rank = one_step(world_size=1)
    rank.all_gather("layers.0", 0, 100, bytes=4000)
    gather = kinds_of(builder.build())["all_gather"]
    assert gather.bus_bytes_per_s is None
    assert gather.algorithm_bytes_per_s == pytest.approx(40e9)


def test_a_collective_without_a_known_message_has_no_bandwidth():
    builder, rank = one_step()
    rank.add(EventKind.BARRIER, 0, 10, method=Method.HOST_BLOCKING)
    barrier = kinds_of(builder.build())["barrier"]
    assert (barrier.num_events, barrier.group, barrier.group_size) == (1, None, None)
    assert (barrier.algorithm_bytes_per_s, barrier.transfer_ns, barrier.link) == (None, None, None)
    assert barrier.method == "host_blocking"


@pytest.mark.parametrize(("num_bounds", "transfer_ns"), [(0, 400), (1, 100), (2, None)])
def test_ends_that_are_upper_bounds_do_not_count_and_most_of_them_hide_the_rest(
    num_bounds, transfer_ns
):
    builder, rank = one_step()
    for number, length in enumerate((100, 100, 1000)):
        flags = EventFlag.LATEST_END * (3 - number <= num_bounds)
        rank.all_gather("layers.0", 2000 * number, 2000 * number + length, flags=flags)
    gather = kinds_of(builder.build())["all_gather"]
    assert (gather.num_events, gather.num_bounds) == (3, num_bounds)
    assert gather.transfer_ns == transfer_ns
    assert (gather.bus_bytes_per_s is None) == (gather.link is None) == (transfer_ns is None)


def test_evaluation_does_not_count():
    builder, rank = one_step()
    rank.all_gather("layers.0", 0, 100, phase=Phase.EVALUATION)
    assert measure_bandwidth(builder.build()).kinds == ()


def test_latency_and_bandwidth_come_from_messages_of_several_sizes():
    builder, rank = one_step(world_size=2)
    for number, (size, duration) in enumerate([(1000, 15), (4000, 30), (8000, 50)] * 3):
        rank.all_gather("layers.0", 60 * number, 60 * number + duration, bytes=size)
    link = kinds_of(builder.build())["all_gather"].link
    assert link.latency_ns == pytest.approx(10, rel=1e-3)
    assert link.bus_bytes_per_s == pytest.approx(0.5 * 200e9, rel=1e-3)


def test_the_kind_with_most_bytes_comes_first():
    kinds = measure_bandwidth(steady_run()).kinds
    assert [kind.kind for kind in kinds] == ["all_gather", "reduce_scatter", "all_reduce"]


def test_a_rank_without_a_timed_step_has_no_bandwidth():
    assert measure_bandwidth(RunBuilder().build()) is None


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 9 not found"):
        measure_bandwidth(steady_run(), rank=9)
