import numpy as np
import pytest

from fsdp_inspect.analysis.exposed import MOST_EVIDENCE, measure_exposed
from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.analysis.wait_causes import timed_collectives
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase
from tests.builders import STEADY_FLOOR_NS, RunBuilder, add_steady_step, steady_run

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


@pytest.mark.parametrize(
    ("source", "recorded_by", "is_fsdp"),
    [
        pytest.param("recorded", "custom_comm", {True, False}, id="recorded"),
        pytest.param("imported", "ranges", {True, False}, id="with FSDP's ranges"),
        pytest.param("imported", "order", {None}, id="without ranges"),
    ],
)
def test_who_issued_a_collective_is_said_only_where_it_is_known(source, recorded_by, is_fsdp):
    builder = RunBuilder(source=source, world_size=1)
    builder.unit("layers.0", recorded_by=recorded_by)
    add_steady_step(builder.rank(0), 0, start=0)
    exposed = measure_exposed(builder.build())
    assert {owner.is_fsdp for owner in exposed.owners} == is_fsdp
    assert {wait.is_fsdp for wait in exposed.evidence} == is_fsdp
    assert all(owner.is_fsdp for owner in exposed.owners if owner.fqn) is (None not in is_fsdp)


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
    assert measure_exposed(run).exposed_ns == 70
    assert measure_exposed(run, rank=0).exposed_ns == 10


def test_a_rank_without_a_timed_step_has_no_exposure():
    assert measure_exposed(steady_run(num_steps=1), rank=1) is None
    assert measure_exposed(RunBuilder().build()) is None


def test_a_rank_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(IncompleteRunError, match=r"Rank 9 not found.*the ranks 0-3\. Choose"):
        measure_exposed(steady_run(world_size=4), rank=9)


def test_the_causes_of_the_rank_and_of_each_owner_add_up():
    exposed = measure_exposed(steady_run())
    assert exposed.causes_ns == {"floor": 150, "late_issue": 40, "bandwidth": 60}
    causes = {(owner.fqn, owner.kind, owner.phase): owner.causes_ns for owner in exposed.owners}
    assert causes["layers.1", "all_gather", "forward"] == {"late_issue": 10, "bandwidth": 40}
    assert causes["layers.1", "all_gather", "backward"] == {"late_issue": 30}
    assert causes["layers.1", "reduce_scatter", "backward"] == {}


def test_the_causes_are_means_over_the_typical_steps():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    for step, (waited, issued) in enumerate(((30, 5), (10, 40), (20, 12))):
        begin = 100 * step
        rank.step(step, begin, begin + 100)
        rank.all_gather("layers.0", begin, begin + 5, need=begin + 5)
        need, issue_ns = begin + 80 - waited, begin + issued
        rank.all_gather("layers.1", begin + 40, begin + 80, need=need, issue_ns=issue_ns)
    exposed = measure_exposed(builder.build())
    assert exposed.exposed_ns == exposed.owners[0].exposed_ns == 20
    # Late issue, from the end of the first gather at 5: 0, min(10, 35) and 7 of the three waits.
    # The mean is 17 / 3 = 5.67, and the rest of 60 / 3 = 20 is 14.33.
    assert exposed.causes_ns == {"bandwidth": 14, "late_issue": 6}
    assert exposed.owners[0].causes_ns == {"bandwidth": 14, "late_issue": 6}


@pytest.mark.parametrize(
    ("unused", "flags", "late_ns"),
    [
        pytest.param(True, EventFlag(0), 20, id="at its use, after an unused one"),
        pytest.param(True, EventFlag.PREFETCHED, 10, id="prefetched, after an unused one"),
        pytest.param(False, EventFlag(0), 10, id="at its use, none unused"),
    ],
)
def test_a_wrong_order_exposes_gathers_whose_prefetch_it_replaces(unused, flags, late_ns):
    builder, rank = one_step()
    wasted = EventFlag.PREFETCHED | (EventFlag.UNUSED if unused else EventFlag(0))
    rank.all_gather("layers.1", 0, 10, need=10, phase=BACKWARD)
    rank.all_gather("layers.1", 10, 20, need=20, phase=BACKWARD, flags=int(wasted))
    rank.all_gather("layers.0", 30, 50, need=30, issue_ns=30, phase=BACKWARD, flags=int(flags))
    exposed = measure_exposed(builder.build())
    assert exposed.causes_ns == {"late_issue": 10, "bandwidth": 10}
    assert exposed.late_prefetch_ns == late_ns


def test_slow_steps_outside_the_middle_half_do_not_count():
    builder, start = RunBuilder(world_size=1), 0
    rank = builder.rank(0)
    for step, (duration, waited) in enumerate(((100, 10), (104, 15), (500, 300), (90, 80))):
        rank.step(step, start, start + duration)
        rank.all_gather("layers.0", start, start + waited, need=start)
        start += duration
    exposed = measure_exposed(builder.build())
    # Steps 0 and 1: (10 + 15) / 2 = 12.5 and (100 + 104) / 2 = 102.
    assert (exposed.step_time_ns, exposed.exposed_ns, exposed.num_steps) == (102, 12, 2)
    assert exposed.causes_ns == {"floor": 12}
    assert exposed.floor_ns == exposed.owners[0].exposed_ns == 12


def test_evidence_is_the_longest_wait_of_each_owner_with_its_place_in_the_step():
    evidence = measure_exposed(steady_run()).evidence
    assert [wait.exposed_ns for wait in evidence] == [100, 50, 50, 30, 20]
    assert [(wait.count, wait.median_ns) for wait in evidence[:2]] == [(3, 100), (3, 50)]
    gather = evidence[2]
    assert (gather.step, gather.fqn, gather.kind, gather.phase) == (
        1,
        "layers.1",
        "all_gather",
        "forward",
    )
    assert (gather.issue_ns, gather.start_ns, gather.need_ns, gather.end_ns) == (110, 110, 210, 260)
    assert (gather.cause, gather.bytes, gather.group, gather.sequence) == ("bandwidth", 64, 0, None)
    assert (gather.ahead.fqn, gather.ahead.kind, gather.ahead.end_ns) == (
        "layers.0",
        "all_gather",
        100,
    )


def test_of_one_unit_every_wait_is_evidence_and_the_rank_stays_whole():
    exposed = measure_exposed(steady_run(), unit=1)
    assert {owner.fqn for owner in exposed.owners} == {"layers.1"}
    assert [(wait.step, wait.exposed_ns) for wait in exposed.evidence] == [
        (1, 50),
        (2, 50),
        (3, 50),
        (1, 30),
        (2, 30),
        (3, 30),
    ]
    assert exposed.exposed_ns == 250


def test_evidence_is_limited():
    builder, rank = one_step()
    for number in range(30):
        rank.all_gather("layers.0", number, number + 1, need=number)
    assert len(measure_exposed(builder.build(), unit=0).evidence) == MOST_EVIDENCE


def test_arrivals_of_the_last_rank_name_stragglers():
    run = steady_run()
    collectives = timed_collectives(run, timed_rank(run, 0))
    arrivals = np.where(collectives.kind == EventKind.REDUCE_SCATTER, collectives.end_ns - 30, -1)
    exposed = measure_exposed(run, rank=0, last_arrival_ns=arrivals)
    assert exposed.causes_ns["straggler"] == 70
    assert exposed.owners[0].causes_ns == {"straggler": 70, "floor": 30}
    assert exposed.causes_ns["floor"] == 80


def test_the_floor_is_its_cause_without_waits_for_stragglers():
    run = steady_run()
    assert measure_exposed(run).floor_ns == STEADY_FLOOR_NS
    collectives = timed_collectives(run, timed_rank(run, 0))
    exposed = measure_exposed(run, rank=0, last_arrival_ns=collectives.end_ns - 1)
    assert exposed.floor_ns == exposed.causes_ns["floor"] < STEADY_FLOOR_NS
    assert sum(owner.floor_ns for owner in exposed.owners) == exposed.floor_ns


def test_the_passes_of_all_units_together_are_told_most_exposed_first():
    passes = measure_exposed(steady_run()).passes
    told = [(one.kind, one.phase, one.num_units, one.exposed_ns) for one in passes]
    assert told == [
        ("all_gather", "forward", 2, 100),
        ("reduce_scatter", "backward", 2, 100),
        ("all_gather", "backward", 2, 30),
        ("all_reduce", "backward", 0, 20),
    ]
    assert passes[0].causes_ns == {"floor": 50, "bandwidth": 40, "late_issue": 10}
    assert [one.kind for one in measure_exposed(steady_run(), unit=0).passes] == [
        "reduce_scatter",
        "all_gather",
        "all_gather",
    ]
