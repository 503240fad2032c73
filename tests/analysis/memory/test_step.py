import dataclasses

import pytest

from fsdp_inspect.analysis.memory.step import PlaceSpan, measure_step_memory
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from tests.builders import RunBuilder, steady_run

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def tracked_run():
    builder = RunBuilder(memory_steps=[1])
    rank = builder.rank(0)
    for step in (0, 1):
        rank.step(step, step * 100, step * 100 + 100, is_memory_step=step == 1)
    one, two = "layers.0", "layers.1"
    rank.memory(MemoryPoint.FORWARD_START, 40, unit=one, phase=FORWARD, sharded_parameter=40)
    rank.memory(
        MemoryPoint.FORWARD_END, 60, unit=one, phase=FORWARD, sharded_parameter=40, activation=15
    )
    rank.memory(MemoryPoint.PEAK, 90, unit=two, phase=BACKWARD, sharded_parameter=40, activation=50)
    rank.memory(MemoryPoint.PEAK_BY_OWNER, 90, unit=two, activation=50)
    rank.memory(MemoryPoint.STEP_END, 40, sharded_parameter=40, outside_allocator=7)
    return builder.build()


def allocator_run():
    """Two steps with readings of 10, 30 and 10; the second peaks at 50 between its readings."""
    builder = RunBuilder(device_type="cuda", backend="nccl")
    rank = builder.rank(0)
    rank.record.update(memory_from="cuda_allocator", device_memory_bytes=100)
    for step, peak in enumerate((30, 50)):
        rank.step(step, step * 100, step * 100 + 100)
        seen = {"reserved": 60, "peak_reserved": 60}
        rank.memory(MemoryPoint.FORWARD_START, 10, peak_allocated=30, phase=FORWARD, **seen)
        rank.memory(
            MemoryPoint.BACKWARD_END, 30, unit="layers.1", phase=BACKWARD, peak_allocated=peak,
            **seen,
        )  # fmt: skip
        rank.memory(MemoryPoint.STEP_END, 10, peak_allocated=peak, **seen)
    return builder.build()


def test_readings_come_by_time_with_the_place_of_the_program():
    memory = measure_step_memory(tracked_run(), rank=0)
    assert memory.step == 1
    assert [reading.allocated_bytes for reading in memory.readings] == [40, 60, 90, 40]
    assert [reading.fqn for reading in memory.readings] == [
        "layers.0",
        "layers.0",
        "layers.1",
        None,
    ]
    assert [reading.reserved_bytes for reading in memory.readings] == [None] * 4


def test_categories_add_up_to_what_was_allocated():
    composition = measure_step_memory(tracked_run(), rank=0).composition
    assert {one.category: one.bytes for one in composition.series} == {
        "sharded_parameter": (40, 40, 40, 40),
        "activation": (0, 15, 50, 0),
        "unattributed": (0, 5, 0, 0),
    }


def test_the_peak_is_named_by_its_place():
    peak = measure_step_memory(tracked_run(), rank=0).peak
    assert (peak.highest_bytes, peak.fqn, peak.phase, peak.point) == (
        90, "layers.1", "backward", "peak",
    )  # fmt: skip


def test_stretches_say_how_long_the_program_stood_where():
    memory = measure_step_memory(tracked_run(), rank=0)
    assert memory.phases == (
        PlaceSpan("forward", 0, 2), PlaceSpan("backward", 2, 4), PlaceSpan("outside", 4, 4),
    )  # fmt: skip
    assert memory.units == (
        PlaceSpan("layers.0", 0, 2), PlaceSpan("layers.1", 2, 4), PlaceSpan(None, 4, 4),
    )  # fmt: skip


def test_an_allocators_new_peak_belongs_to_the_reading_after_it():
    memory = measure_step_memory(allocator_run(), rank=0)
    assert (memory.step, memory.is_allocator, memory.composition) == (1, True, None)
    assert [reading.highest_bytes for reading in memory.readings] == [10, 50, 10]
    assert (memory.peak.highest_bytes, memory.peak.fqn) == (50, "layers.1")


def test_another_step_is_shown_when_asked_for():
    memory = measure_step_memory(allocator_run(), rank=0, step=0)
    assert memory.peak.highest_bytes == 30
    assert memory.sampled_steps == (0, 1)


def test_a_step_without_readings_has_nothing_to_show():
    assert measure_step_memory(tracked_run(), rank=0, step=0) is None
    assert measure_step_memory(steady_run(), rank=0) is None


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 9 not found"):
        measure_step_memory(tracked_run(), rank=9)


def test_a_tracker_beside_an_allocator_gives_the_areas_and_the_allocator_the_lines():
    run = allocator_run()
    tracked = tracked_run().memory(0)
    both = type(tracked).concat([run.memory(0), tracked])
    memory = measure_step_memory(dataclasses.replace(run, memory_tables={0: both}), rank=0)
    assert [reading.allocated_bytes for reading in memory.readings] == [10, 30, 10]
    assert [one.category for one in memory.composition.series] == [
        "sharded_parameter", "activation", "unattributed",
    ]  # fmt: skip
