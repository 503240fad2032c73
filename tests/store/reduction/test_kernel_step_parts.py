"""In kernel traces, communication is exposed if no kernel covers it."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.store.reduction.step_parts import (
    exposed_ns,
    exposing,
    is_kernel_trace,
    reduce_rank,
    running_communication,
    split_step,
    waited_since,
)
from fsdp_inspect.trace.codes import PARTS_OF_STEP, EventKind, Phase, StepPart, Stream
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder

STEP_NS = 100
DRAWN_PARTS = {
    StepPart.EXPOSED_ALL_GATHER: 10,
    StepPart.EXPOSED_REDUCE_SCATTER: 10,
    StepPart.EXPOSED_OTHER: 2,
    StepPart.HOST_BOUND: 13,
    StepPart.FSDP_COPIES: 5,
    StepPart.OPTIMIZER: 10,
    StepPart.BACKWARD: 20,
    StepPart.FORWARD: 20,
    StepPart.OTHER: 10,
    StepPart.COMMUNICATION: 42,
}


@pytest.fixture
def builder():
    """One step of 100 ns on a device.

    0    5     15   20   25      35  45         65    75  78  88  93     98  100
         gather     copy forward    | backward  |         opt  ?  memcpy
         ^^^^^^          gather             55 scatter ^^ reduce 74-77
    """
    builder = RunBuilder()
    rank = builder.rank(0)
    rank.step(0, 0, STEP_NS)
    rank.all_gather("layers.0", 5, 15)
    rank.all_gather("layers.1", 25, 35)
    add_compute(rank, 20, 65)
    rank.add(EventKind.ALL_GATHER_COPY_OUT, 20, 25, unit="layers.0", stream=Stream.COMPUTE)
    add_compute(rank, 25, 45, Phase.FORWARD)
    add_compute(rank, 45, 65, Phase.BACKWARD)
    rank.reduce_scatter("layers.0", 55, 75)
    rank.all_reduce(None, 74, 77)
    add_compute(rank, 78, 88, Phase.OPTIMIZER)
    add_compute(rank, 88, 93)
    rank.add(EventKind.MEMORY_COPY, 93, 98, stream=Stream.OTHER)
    return builder


def add_compute(rank, start, end, phase=Phase.OUTSIDE):
    rank.add(EventKind.COMPUTE, start, end, phase=phase, stream=Stream.COMPUTE)


def events_of(builder):
    return EventTable.from_rows(builder.rank(0).events)


def test_a_drawn_kernel_trace_splits_as_drawn(builder):
    parts = split_step(events_of(builder), 0, STEP_NS)
    assert {part: parts[part].duration_ns for part in DRAWN_PARTS} == DRAWN_PARTS
    assert sum(parts[part].duration_ns for part in PARTS_OF_STEP) == STEP_NS


def test_each_collective_is_exposed_where_no_kernel_runs(builder):
    events = events_of(builder)
    exposed = exposed_ns(events, running_communication(events))
    collectives = np.isin(events.kind, (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER))
    assert exposed[collectives].tolist() == [10, 0, 10]


def test_kernels_and_the_device_copies_are_never_exposed(builder):
    events = events_of(builder)
    exposed = exposed_ns(events, running_communication(events))
    assert not exposed[np.isin(events.kind, (EventKind.COMPUTE, EventKind.MEMORY_COPY))].any()


def test_device_copies_cover_no_communication():
    rank = RunBuilder().rank(0)
    rank.step(0, 0, STEP_NS)
    rank.all_gather("layers.0", 0, 50)
    add_compute(rank, 0, 10)
    rank.add(EventKind.MEMORY_COPY, 10, 50, stream=Stream.OTHER)
    events = EventTable.from_rows(rank.events)
    assert split_step(events, 0, STEP_NS)[StepPart.EXPOSED_ALL_GATHER].duration_ns == 40


def test_an_empty_kernel_marks_a_trace_in_which_nothing_was_computed():
    rank = RunBuilder().rank(0)
    rank.step(0, 0, STEP_NS)
    rank.all_gather("layers.0", 10, 30)
    add_compute(rank, 0, 0)
    events = EventTable.from_rows(rank.events)
    assert is_kernel_trace(events)
    assert exposed_ns(events, running_communication(events)).tolist() == [0, 20, 0]


def test_the_owners_analysis_sees_the_kernels_too(builder):
    exposed = measure_exposed(builder.build())
    assert exposed.exposed_ns == 22
    assert exposed.floor_ns == 20


def test_a_recorded_rank_counts_from_its_need():
    rank = RunBuilder().rank(0)
    rank.all_gather("layers.0", 10, 30, need=20)
    rank.all_gather("layers.0", 40, 60)
    events = EventTable.from_rows(rank.events)
    assert waited_since(events).tolist() == [20, 60]
    communication = running_communication(events)
    assert exposing(events, communication) is communication


SPANS = st.lists(st.tuples(st.integers(0, STEP_NS), st.integers(0, STEP_NS)), max_size=8)


@given(SPANS, SPANS)
def test_exposed_communication_is_what_compute_leaves_uncovered(collectives, kernels):
    rank = RunBuilder().rank(0)
    rank.step(0, 0, STEP_NS)
    add_compute(rank, 0, 0)
    for low, high in collectives:
        rank.all_gather("layers.0", min(low, high), max(low, high))
    for low, high in kernels:
        add_compute(rank, min(low, high), max(low, high), Phase.BACKWARD)
    summary = reduce_rank(EventTable.from_rows(rank.events), rank=0)
    step = summary.where(summary.kind == EventKind.STEP)
    assert step.exposed_ns.tolist() == [_count_exposed(collectives, kernels)]


def _count_exposed(collectives, kernels):
    """Count nanosecond by nanosecond."""
    communicates, computes = ({*_moments(spans)} for spans in (collectives, kernels))
    return len(communicates - computes)


def _moments(spans):
    return (moment for low, high in spans for moment in range(min(low, high), max(low, high)))
