import numpy as np
import pytest

from fsdp_inspect.store.reduction.step_parts import reduce_rank, split_step
from fsdp_inspect.trace.codes import (
    PARTS_OF_STEP,
    EventFlag,
    EventKind,
    Method,
    Phase,
    StepFlag,
    StepPart,
    Stream,
)
from fsdp_inspect.trace.tables import EventTable
from tests.builders import (
    STEADY_COMMUNICATION_NS,
    STEADY_EXPOSED_NS,
    STEADY_PARTS,
    RunBuilder,
    add_steady_step,
)

WAIT = EventKind.ALL_GATHER_WAIT


@pytest.fixture
def rank():
    builder = RunBuilder().rank(0)
    builder.step(0, 0, 100)
    return builder


def parts_of(rank):
    summary = reduce_rank(EventTable.from_rows(rank.events), rank=0)
    return {
        StepPart(kind).label: duration
        for kind, duration in zip(summary.kind.tolist(), summary.duration_ns.tolist(), strict=True)
        if kind >= min(StepPart)
    }


def rows_of(rank, kind):
    summary = reduce_rank(EventTable.from_rows(rank.events), rank=0)
    return summary.where(summary.kind == kind)


def test_a_drawn_step_splits_as_drawn():
    rank = RunBuilder().rank(0)
    add_steady_step(rank, 0, start=7_000)
    parts = parts_of(rank)
    assert {name: parts[name] for name in STEADY_PARTS} == STEADY_PARTS
    assert parts["communication"] == STEADY_COMMUNICATION_NS


def test_the_parts_are_disjoint_and_cover_the_step():
    rank = RunBuilder().rank(0)
    add_steady_step(rank, 0, start=0)
    parts = split_step(EventTable.from_rows(rank.events), 0, 1000)
    moments = np.concatenate(
        [
            np.arange(start, end)
            for part in PARTS_OF_STEP
            for start, end in zip(parts[part].starts, parts[part].ends, strict=True)
        ]
    )
    assert sorted(moments.tolist()) == list(range(1000))


def test_the_step_row_carries_exposed_time_and_bytes():
    rank = RunBuilder().rank(0)
    add_steady_step(rank, 0, start=0)
    step = rows_of(rank, EventKind.STEP)
    assert step.exposed_ns.tolist() == [STEADY_EXPOSED_NS]
    assert step.bytes.tolist() == [6 * 64 + 4]


def test_a_wait_before_communication_begins_is_host_bound_not_exposed(rank):
    on_compute = {"unit": "layers.0", "phase": Phase.FORWARD, "stream": Stream.COMPUTE}
    rank.add(WAIT, 10, 50, **on_compute)
    rank.all_gather("layers.0", 30, 50, need=10)
    parts = parts_of(rank)
    assert (parts["host_bound"], parts["exposed_all_gather"]) == (20, 20)


def test_waiting_behind_another_collective_is_exposed(rank):
    rank.reduce_scatter("layers.1", 0, 40)
    rank.all_gather("layers.0", 40, 60, need=20)
    assert parts_of(rank)["exposed_all_gather"] == 40


def test_a_collective_that_nobody_waits_for_is_not_exposed(rank):
    rank.all_gather("layers.0", 10, 90)
    parts = parts_of(rank)
    assert (parts["exposed_all_gather"], parts["communication"]) == (0, 80)


def test_a_collective_that_ended_before_it_was_needed_is_not_exposed(rank):
    rank.all_gather("layers.0", 10, 20, need=30)
    assert parts_of(rank)["exposed_all_gather"] == 0


def test_an_all_reduce_of_hsdp_is_told_from_one_of_clipping(rank):
    rank.all_reduce("layers.0", 0, 10, need=0)
    rank.all_reduce(None, 20, 50, need=20)
    parts = parts_of(rank)
    assert (parts["exposed_all_reduce"], parts["exposed_other"]) == (10, 30)


def test_recomputation_belongs_to_backward(rank):
    flags = int(EventFlag.RECOMPUTE)
    rank.add(EventKind.FORWARD, 10, 30, unit="layers.0", phase=Phase.BACKWARD, flags=flags)
    rank.add(EventKind.RECOMPUTE, 30, 40, unit="layers.0", phase=Phase.BACKWARD)
    parts = parts_of(rank)
    assert (parts["forward"], parts["backward"]) == (0, 30)


def test_evaluation_before_a_step_is_not_in_its_time(rank):
    rank.add(EventKind.BETWEEN_STEPS, 0, 40)
    rank.all_gather("layers.0", 10, 30, need=10, phase=Phase.EVALUATION)
    rank.forward("layers.0", 40, 90)
    step = rows_of(rank, EventKind.STEP)
    assert (step.duration_ns[0], step.exposed_ns[0], step.bytes[0]) == (60, 0, 0)
    assert step.flags[0] & StepFlag.HAS_BETWEEN
    assert parts_of(rank)["between_steps"] == 40


def test_copies_on_another_stream_do_not_stop_the_clock(rank):
    copy_in = EventKind.ALL_GATHER_COPY_IN
    rank.add(copy_in, 10, 20, unit="layers.0", stream=Stream.ALL_GATHER_COPY_IN)
    rank.add(copy_in, 30, 35, unit="layers.0", stream=Stream.COMPUTE)
    assert parts_of(rank)["fsdp_copies"] == 5


def test_an_unfinished_step_has_no_rows():
    rank = RunBuilder().rank(0)
    rank.forward("layers.0", 0, 10)
    assert len(reduce_rank(EventTable.from_rows(rank.events), rank=0)) == 0


def test_a_rank_without_events_has_no_rows():
    assert len(reduce_rank(EventTable.empty(), rank=0)) == 0


def test_a_memory_step_is_flagged():
    rank = RunBuilder().rank(0)
    rank.step(0, 0, 10, is_memory_step=True)
    assert rows_of(rank, EventKind.STEP).flags[0] & StepFlag.MEMORY_STEP


def test_rows_of_a_unit_add_up_by_phase_and_kind(rank):
    rank.all_gather("layers.0", 0, 10, need=0, bytes=100)
    rank.all_gather("layers.0", 20, 50, bytes=100)
    rank.all_gather("layers.0", 60, 65, need=60, phase=Phase.BACKWARD, bytes=100)
    rows = rows_of(rank, EventKind.ALL_GATHER)
    assert rows.phase.tolist() == [Phase.FORWARD, Phase.BACKWARD]
    assert rows.count.tolist() == [2, 1]
    assert rows.bytes.tolist() == [200, 100]
    assert rows.duration_ns.tolist() == [40, 5]
    assert rows.median_ns.tolist() == [10, 5]
    assert rows.exposed_ns.tolist() == [10, 5]


def test_an_unknown_message_size_counts_nothing(rank):
    rank.all_gather("layers.0", 0, 10, bytes=-1)
    rank.all_gather("layers.1", 20, 30, bytes=50)
    assert rows_of(rank, EventKind.STEP).bytes.tolist() == [50]
    assert rows_of(rank, EventKind.ALL_GATHER).bytes.tolist() == [0, 50]


def test_rows_come_in_the_order_of_steps():
    rank = RunBuilder().rank(0)
    for number in (2, 0, 1):
        add_steady_step(rank, number, start=number * 1000)
    summary = reduce_rank(EventTable.from_rows(rank.events), rank=5, attempt=2)
    assert np.all(np.diff(summary.step) >= 0)
    assert set(summary.rank.tolist()) == {5}
    assert set(summary.attempt.tolist()) == {2}


def test_time_in_a_blocking_collective_is_exposed_from_its_start(rank):
    method = int(Method.HOST_BLOCKING)
    rank.all_gather("layers.0", 10, 40, need=10, stream=Stream.HOST, method=method)
    rank.forward("layers.0", 0, 100)
    parts = parts_of(rank)
    assert (parts["exposed_all_gather"], parts["forward"]) == (30, 70)
