import pytest

from fsdp_inspect.store.reduction.memory_parts import reduce_memory
from fsdp_inspect.trace.codes import MemoryPoint, StepPart
from fsdp_inspect.trace.tables import MemoryTable
from tests.builders import RunBuilder


@pytest.fixture
def rank():
    return RunBuilder().rank(0)


def values_of(rank, part, memory_from="cuda_allocator"):
    """The values of a part by step."""
    rows = reduce_memory(MemoryTable.from_rows(rank.samples), memory_from=memory_from, rank=3)
    rows = rows.where(rows.kind == part)
    return dict(zip(rows.step.tolist(), rows.bytes.tolist(), strict=True))


def sample(rank, step, allocated, *, counter, point=MemoryPoint.FORWARD_END, **columns):
    rank.step(step, step * 100, step * 100 + 100)
    rank.memory(point, allocated, peak_allocated=counter, **columns)


def test_the_peak_of_a_step_is_its_highest_reading(rank):
    for step, allocated in ((0, 50), (1, 10), (1, 30), (1, 20)):
        sample(rank, step, allocated, counter=50)
    assert values_of(rank, StepPart.PEAK_ALLOCATED) == {0: 50, 1: 30}


def test_a_counter_that_rises_tells_the_peak_between_two_readings(rank):
    for step, counter in ((0, 50), (1, 50), (2, 80), (2, 80), (3, 80)):
        sample(rank, step, 10, counter=counter)
    assert values_of(rank, StepPart.PEAK_ALLOCATED) == {0: 50, 1: 10, 2: 80, 3: 10}


def test_a_counter_that_falls_was_reset_by_the_user_and_tells_the_peak_since(rank):
    for step, counter in ((0, 50), (1, 50), (2, 40)):
        sample(rank, step, 10, counter=counter)
    assert values_of(rank, StepPart.PEAK_ALLOCATED)[2] == 40


def test_over_all_steps_the_peak_is_the_counters(rank):
    for step, counter in ((0, 90), (1, 90), (2, 95), (3, 95)):
        sample(rank, step, 10, counter=counter)
    assert max(values_of(rank, StepPart.PEAK_ALLOCATED).values()) == 95


def test_the_trackers_peak_since_the_reading_before_counts_every_time(rank):
    for step in (0, 1):
        sample(rank, step, 10, counter=50)
    assert values_of(rank, StepPart.PEAK_ALLOCATED, "storage_tracker") == {0: 50, 1: 50}


def test_rows_by_owner_are_no_readings(rank):
    sample(rank, 0, 10, counter=10)
    sample(rank, 0, 99, counter=-1, point=MemoryPoint.PEAK_BY_OWNER)
    assert values_of(rank, StepPart.PEAK_ALLOCATED, "storage_tracker") == {0: 10}


def test_what_the_tracker_counts_beside_an_allocator_is_left_out(rank):
    sample(rank, 0, 10, counter=10)
    sample(rank, 0, 99, counter=99, activation=99)
    sample(rank, 0, 99, counter=-1, point=MemoryPoint.PEAK)
    assert values_of(rank, StepPart.PEAK_ALLOCATED) == {0: 10}


def test_the_end_of_a_step_is_the_reading_at_its_end(rank):
    sample(rank, 0, 50, counter=50, reserved=64)
    sample(rank, 0, 10, counter=50, reserved=70, point=MemoryPoint.STEP_END)
    assert values_of(rank, StepPart.ALLOCATED_AT_END) == {0: 10}
    assert values_of(rank, StepPart.RESERVED_AT_END) == {0: 70}
    assert values_of(rank, StepPart.PEAK_RESERVED) == {0: 70}


def test_what_is_not_known_has_no_row(rank):
    sample(rank, 0, 50, counter=50)
    rows = reduce_memory(MemoryTable.from_rows(rank.samples), memory_from="", rank=3, attempt=2)
    assert rows.kind.tolist() == [StepPart.PEAK_ALLOCATED]
    assert (rows.rank.tolist(), rows.attempt.tolist(), rows.count.tolist()) == ([3], [2], [1])


def test_no_samples_give_no_rows():
    assert len(reduce_memory(MemoryTable.empty(), memory_from="storage_tracker", rank=0)) == 0
