import numpy as np

from fsdp_inspect.analysis.wait_causes import Cause, split_waits
from fsdp_inspect.trace.codes import EventFlag, EventKind, Method, Phase, Stream
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder, steady_run

BACKWARD = Phase.BACKWARD
ASYNC = int(EventFlag.ASYNC)


def one_step(end=100):
    builder = RunBuilder(("layers.0", "layers.1", "layers.2"), world_size=1)
    rank = builder.rank(0)
    rank.step(0, 0, end)
    # The floor of the forward is hidden, so that no gather of the tests is the floor.
    rank.all_gather("layers.0", 0, 1, need=1)
    return builder, rank


def causes_of(builder, **arrivals):
    """The causes of the collective that was added last."""
    events = builder.build().event_tables[0]
    waits = split_waits(events, **arrivals)
    return named(waits.by_cause_ns[-1])


def named(row):
    return {cause.label: int(row[cause]) for cause in Cause if row[cause]}


def test_a_wait_for_a_collective_issued_in_time_is_bandwidth():
    builder, rank = one_step()
    rank.all_gather("layers.1", 10, 50, need=30, issue_ns=1)
    assert causes_of(builder) == {"bandwidth": 20}


def test_a_wait_is_late_as_far_as_an_earlier_issue_had_shortened_it():
    builder, rank = one_step()
    rank.all_gather("layers.1", 21, 61, need=30, issue_ns=21)
    assert causes_of(builder) == {"late_issue": 20, "bandwidth": 11}


def test_a_late_issue_explains_no_more_than_the_wait():
    builder, rank = one_step()
    rank.all_gather("layers.1", 61, 71, need=65, issue_ns=61)
    assert causes_of(builder) == {"late_issue": 6}


def test_time_lost_after_the_wait_began_is_host_bound_and_not_late_issue():
    builder, rank = one_step()
    rank.all_gather("layers.1", 50, 60, need=5, issue_ns=50)
    assert causes_of(builder) == {"late_issue": 4, "bandwidth": 6}


def test_nothing_can_begin_before_the_one_ahead_has_ended():
    builder, rank = one_step()
    rank.all_gather("layers.2", 1, 40, need=60)
    rank.all_gather("layers.1", 45, 65, need=50, issue_ns=45)
    assert causes_of(builder) == {"late_issue": 5, "bandwidth": 10}


def test_while_the_one_ahead_runs_the_wait_is_serialized():
    builder, rank = one_step()
    rank.reduce_scatter("layers.2", 5, 40)
    rank.all_gather("layers.1", 10, 60, need=30, issue_ns=6, phase=BACKWARD)
    assert causes_of(builder) == {"serialized": 30}


def test_a_queue_behind_another_stream_delays_even_a_wait_that_begins_after_it():
    builder, rank = one_step()
    rank.reduce_scatter("layers.2", 5, 40)
    rank.all_gather("layers.1", 35, 60, need=45, issue_ns=35, phase=BACKWARD)
    assert causes_of(builder) == {"serialized": 5, "bandwidth": 10}


def test_the_order_of_its_own_stream_is_no_queue():
    builder, rank = one_step()
    rank.all_gather("layers.2", 1, 40, need=60)
    rank.all_gather("layers.1", 2, 60, need=45, issue_ns=2)
    assert causes_of(builder) == {"bandwidth": 15}


def test_communication_on_another_communicator_before_the_issue_is_late_issue():
    builder, rank = one_step()
    rank.all_reduce(None, 10, 30)
    rank.all_gather("layers.1", 30, 40, need=20, issue_ns=30)
    assert causes_of(builder) == {"late_issue": 20}


def test_a_straggler_is_waited_for_until_the_last_rank_arrives():
    builder, rank = one_step()
    rank.all_gather("layers.1", 10, 50, need=20, issue_ns=1)
    arrivals = np.array([-1, 35])
    assert causes_of(builder, last_arrival_ns=arrivals) == {"straggler": 15, "bandwidth": 15}


def test_an_arrival_that_is_not_known_or_past_makes_no_straggler():
    builder, rank = one_step()
    rank.all_gather("layers.1", 10, 50, need=20, issue_ns=1)
    for arrival in (-1, 5, 10):
        arrivals = np.array([-1, arrival])
        assert causes_of(builder, last_arrival_ns=arrivals) == {"bandwidth": 30}


def test_the_first_gather_of_a_forward_is_floor_less_what_a_straggler_costs():
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)
    builder.rank(0).all_gather("layers.0", 10, 50, need=10)
    arrivals = np.array([30])
    assert causes_of(builder, last_arrival_ns=arrivals) == {"straggler": 20, "floor": 20}


def test_the_last_reduction_of_a_backward_is_floor():
    builder, rank = one_step()
    rank.reduce_scatter("layers.1", 20, 40, need=20)
    assert causes_of(builder) == {"floor": 20}


def test_what_blocks_the_host_is_blocking_however_late_it_was():
    builder, rank = one_step()
    rank.all_gather("layers.1", 40, 60, need=40, method=Method.HOST_BLOCKING, stream=Stream.HOST)
    assert causes_of(builder) == {"blocking": 20}


def test_a_reduction_can_begin_when_its_gradients_are_complete():
    builder, rank = one_step()
    rank.backward("layers.1", 10, 30)
    rank.reduce_scatter("layers.2", 90, 95, need=90)
    rank.reduce_scatter("layers.1", 50, 80, need=60)
    assert causes_of(builder) == {"late_issue": 20}


def test_an_all_reduce_of_hsdp_can_begin_when_its_reduce_scatter_has_ended():
    builder, rank = one_step()
    rank.reduce_scatter("layers.2", 90, 95, need=90)
    rank.reduce_scatter("layers.1", 10, 40)
    rank.all_reduce("layers.1", 45, 80, need=60)
    assert causes_of(builder) == {"late_issue": 5, "bandwidth": 15}


def test_it_is_not_known_how_early_other_collectives_could_have_been_issued():
    builder, rank = one_step()
    rank.all_reduce(None, 50, 80, need=60)
    assert causes_of(builder) == {"bandwidth": 20}


def add_copy_outs(rank, *spans):
    for start, end in spans:
        kind = EventKind.ALL_GATHER_COPY_OUT
        rank.add(kind, start, end, unit="layers.0", stream=Stream.COMPUTE, issue_ns=3)


def test_in_forward_a_gather_waits_for_the_copy_out_before_the_last_one():
    builder, rank = one_step()
    add_copy_outs(rank, (20, 25), (30, 35))
    rank.all_gather("layers.1", 40, 60, need=45, issue_ns=29)
    assert causes_of(builder) == {"late_issue": 4, "bandwidth": 11}


def test_in_backward_and_with_a_handle_a_gather_waits_for_the_last_copy_out():
    for columns in ({"phase": BACKWARD}, {"flags": ASYNC}):
        builder, rank = one_step()
        add_copy_outs(rank, (10, 15), (20, 25))
        rank.all_gather("layers.1", 40, 60, need=45, issue_ns=29, **columns)
        assert causes_of(builder) == {"late_issue": 4, "bandwidth": 11}


def test_a_gather_cannot_begin_before_the_optimizer_has_ended():
    for columns in ({}, {"kind": EventKind.COMPUTE, "phase": Phase.OPTIMIZER}):
        builder, rank = one_step()
        rank.add(**{"kind": EventKind.OPTIMIZER, "start": 10, "end": 30, **columns})
        rank.all_gather("layers.1", 40, 60, need=40, issue_ns=35)
        assert causes_of(builder) == {"late_issue": 5, "bandwidth": 15}


def test_of_a_gather_amid_the_optimizer_it_is_not_known_when_it_could_have_begun():
    builder, rank = one_step()
    rank.all_gather("layers.1", 40, 60, need=40, issue_ns=35, phase=Phase.OPTIMIZER)
    assert causes_of(builder) == {"bandwidth": 20}


def test_a_kernel_traces_wait_is_what_no_kernel_covers():
    builder, rank = one_step()
    rank.add(EventKind.COMPUTE, 0, 30, stream=Stream.COMPUTE)
    rank.add(EventKind.COMPUTE, 40, 45, stream=Stream.COMPUTE)
    rank.all_gather("layers.1", 20, 60, issue_ns=11)
    assert causes_of(builder) == {"late_issue": 10, "bandwidth": 15}


def test_a_collective_that_nobody_waited_for_has_no_causes():
    builder, rank = one_step()
    rank.all_gather("layers.1", 10, 50)
    assert causes_of(builder) == {}


def test_what_lies_outside_the_step_is_not_split():
    builder, rank = one_step(end=40)
    rank.add(EventKind.BETWEEN_STEPS, 20, 30)
    rank.all_gather("layers.1", 10, 50, need=15, issue_ns=1)
    assert causes_of(builder) == {"bandwidth": 15}


def test_an_instant_that_two_waits_cover_is_shared_out_once():
    builder, rank = one_step()
    rank.all_gather("layers.1", 10, 50, need=20, issue_ns=1)
    rank.all_reduce(None, 15, 60, need=30)
    waits = split_waits(builder.build().event_tables[0])
    assert waits.exposed_ns.tolist() == [0, 30, 30]
    assert waits.share_by_cause_ns.sum(axis=1).tolist() == [0, 30, 10]


def test_a_steady_step_is_split_so():
    events = steady_run().event_tables[0]
    waits = split_waits(events)
    assert named(waits.share_by_cause_ns.sum(axis=0)) == {
        "floor": 4 * 150,
        "late_issue": 4 * (10 + 30),
        "bandwidth": 4 * (40 + 20),
    }


def test_no_events_have_no_waits():
    assert len(split_waits(EventTable.empty()).exposed_ns) == 0


def test_in_an_unfinished_step_nothing_is_exposed():
    builder = RunBuilder()
    builder.rank(0).all_gather("layers.0", 10, 50, need=10)
    assert causes_of(builder) == {}
