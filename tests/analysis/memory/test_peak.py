from dataclasses import replace

import pytest

from fsdp_inspect.analysis.memory.peak import CategoryBytes, measure_memory
from fsdp_inspect.errors import CorruptFileError, IncompleteRunError
from fsdp_inspect.trace.codes import MemoryPoint, Phase, StepPart
from fsdp_inspect.trace.run import FailedRequest
from tests.builders import MIB, InMemoryRun, RunBuilder, steady_run

GIB = 1 << 30


def cuda_run(*, reserved=30 * GIB, device=40 * GIB):
    builder = RunBuilder(world_size=2, device_type="cuda", backend="nccl")
    for number in range(2):
        rank = builder.rank(number)
        rank.record.update(memory_from="cuda_allocator", device_memory_bytes=device)
        for step, highest in enumerate((20, 22 + number)):
            rank.step(step, step * 100, step * 100 + 100)
            rank.memory(
                MemoryPoint.BACKWARD_START,
                (highest - 1) * GIB,
                peak_allocated=highest * GIB,
                reserved=reserved,
                peak_reserved=reserved,
            )
            rank.memory(MemoryPoint.STEP_END, 10 * GIB, peak_allocated=highest * GIB)
    return builder.build()


def tracked_run():
    builder = RunBuilder(memory_steps=[1])
    rank = builder.rank(0)
    rank.step(1, 0, 100, is_memory_step=True)
    rank.memory(MemoryPoint.STEP_END, 40)
    rank.memory(
        MemoryPoint.PEAK,
        100,
        unit="layers.1",
        phase=Phase.BACKWARD,
        activation=50,
        unsharded_parameter=30,
        sharded_parameter=0,
        outside_allocator=7,
    )
    rank.memory(MemoryPoint.PEAK_BY_OWNER, 30, unit="layers.0", activation=30)
    rank.memory(MemoryPoint.PEAK_BY_OWNER, 70, unit="layers.1", unsharded_parameter=70)
    return builder.build()


def test_the_peak_is_that_of_the_highest_rank():
    memory = measure_memory(cuda_run())
    assert (memory.peak_allocated_bytes, memory.peak_rank) == (23 * GIB, 1)
    assert memory.peak_reserved_bytes == 30 * GIB


def test_a_step_adds_what_lies_between_resting_and_peak():
    rank = measure_memory(cuda_run()).ranks[1]
    assert (rank.resting_bytes, rank.step_adds_bytes) == (10 * GIB, 13 * GIB)


def test_the_share_of_the_device_is_what_the_allocator_reserved():
    memory = measure_memory(cuda_run(reserved=38 * GIB, device=40 * GIB))
    assert (memory.device_bytes, memory.device_ratio) == (40 * GIB, pytest.approx(0.95))


def test_an_allocators_running_peak_counts_for_the_step_in_which_it_rose():
    builder = RunBuilder(device_type="cuda", backend="nccl")
    rank = builder.rank(0)
    rank.record.update(memory_from="cuda_allocator")
    for step, (reading, counter) in enumerate(((19, 20), (18, 20), (22, 23), (21, 23))):
        rank.step(step, step * 100, step * 100 + 100)
        rank.memory(
            MemoryPoint.BACKWARD_START, reading * GIB, peak_allocated=counter * GIB, reserved=GIB
        )
    steps = measure_memory(builder.build()).over_steps
    assert [step.highest_allocated_bytes // GIB for step in steps] == [20, 18, 23, 21]


def test_on_cpu_nothing_is_reserved_and_there_is_no_device():
    memory = measure_memory(tracked_run())
    assert (memory.peak_reserved_bytes, memory.device_bytes, memory.device_ratio) == (None,) * 3
    assert memory.peak_allocated_bytes == 100


def test_the_peak_has_a_position_and_categories_that_add_up():
    peak = measure_memory(tracked_run()).peak
    assert (peak.step, peak.fqn, peak.phase, peak.bytes) == (1, "layers.1", "backward", 100)
    assert peak.categories == (
        CategoryBytes("activation", 50),
        CategoryBytes("unsharded_parameter", 30),
        CategoryBytes("unattributed", 20),
        CategoryBytes("outside_allocator", 7),
    )


@pytest.mark.parametrize(("peaks", "step"), [((9, 9), 2), ((10, 9), 1)])
def test_of_equal_peaks_the_last_counts_whose_lines_are_known(peaks, step):
    builder = RunBuilder(memory_steps=[1, 2])
    rank = builder.rank(0)
    for number, highest in enumerate(peaks, start=1):
        rank.step(number, number * 100, number * 100 + 100, is_memory_step=True)
        rank.memory(MemoryPoint.PEAK, highest, unit="layers.1", phase=Phase.BACKWARD)
    assert measure_memory(builder.build()).peak.step == step


def test_owners_of_the_peak_come_largest_first():
    owners = measure_memory(tracked_run()).peak.owners
    assert [(owner.fqn, owner.bytes) for owner in owners] == [("layers.1", 70), ("layers.0", 30)]
    assert owners[0].categories == (CategoryBytes("unsharded_parameter", 70),)


def test_the_trackers_peak_is_not_an_allocators_sample():
    run = cuda_run()
    builder = RunBuilder()
    builder.rank(0).memory(MemoryPoint.PEAK, 99 * GIB)
    tracked = builder.build().memory_tables[0]
    both = replace(run, memory_tables={0: tracked, 1: run.memory_tables[1]})
    assert measure_memory(both).peak_allocated_bytes == 23 * GIB


def test_a_run_without_memory_has_none_and_not_zero():
    memory = measure_memory(steady_run())
    assert (memory.peak_allocated_bytes, memory.peak, memory.over_steps) == (None, None, ())
    assert [rank.peak_allocated_bytes for rank in memory.ranks] == [None, None]


class ReluctantRun(InMemoryRun):
    """A run that reads the samples of rank 1 only on request, and then fails."""

    def memory(self, rank):
        assert rank == 1, "the samples of one rank are enough"
        raise CorruptFileError("memory.parquet of rank 1 is damaged.")


def test_damaged_samples_leave_the_peaks_that_the_summary_knows():
    memory = measure_memory(ReluctantRun(**vars(cuda_run())))
    assert [rank.peak_allocated_bytes // GIB for rank in memory.ranks] == [22, 23]
    assert (memory.peak, memory.positions) == (None, ())
    assert memory.unreadable == ("memory.parquet of rank 1 is damaged.",)


class OldRun(InMemoryRun):
    """A run whose summary is older than the memory rows."""

    def summary(self, *, ranks=None, kinds=None):
        rows = super().summary(ranks=ranks, kinds=kinds)
        return rows.where(rows.kind < StepPart.PEAK_ALLOCATED)


def test_without_memory_in_the_summary_the_samples_are_asked():
    old, new = OldRun(**vars(cuda_run())), cuda_run()
    assert measure_memory(old) == measure_memory(new)


def test_another_rank_can_be_asked_for():
    memory = measure_memory(cuda_run(), rank=0)
    assert (memory.peak_rank, memory.shown_rank) == (1, 0)
    assert memory.over_steps[-1].highest_allocated_bytes == 22 * GIB


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 7 not found"):
        measure_memory(cuda_run(), rank=7)


def test_readings_are_told_by_the_place_of_the_program():
    builder = RunBuilder()
    rank = builder.rank(0)
    for step in (0, 1):
        rank.step(step, 0, 100)
        rank.memory(MemoryPoint.FORWARD_END, 5, unit="layers.0", phase=Phase.FORWARD)
        rank.memory(
            MemoryPoint.BACKWARD_START, 6 + step, unit="layers.1", phase=Phase.BACKWARD,
            peak_allocated=9,
        )  # fmt: skip
        rank.memory(MemoryPoint.STEP_END, 2)
    places = measure_memory(builder.build()).positions
    assert [(one.fqn, one.phase, one.step, one.bytes) for one in places] == [
        ("layers.1", "backward", 0, 9),
        ("layers.0", "forward", 0, 5),
        (None, "outside", 0, 2),
    ]


def test_the_spread_names_the_lowest_and_the_highest_rank():
    spread = measure_memory(cuda_run()).spread
    assert (spread.lowest_rank, spread.highest_rank) == (0, 1)
    assert (spread.lowest_bytes, spread.highest_bytes) == (22 * GIB, 23 * GIB)
    assert measure_memory(tracked_run()).spread is None


def test_a_failed_request_of_any_rank_is_told():
    run = cuda_run()
    failed = FailedRequest(requested_bytes=GIB, device_free_bytes=5)
    ranks = [run.ranks[0].model_copy(update={"failed_request": failed}), run.ranks[1]]
    assert measure_memory(replace(run, ranks=ranks)).failed_request == failed


def test_steps_of_the_tracker_show_the_peak_between_samples():
    builder = RunBuilder()
    builder.rank(0).step(3, 0, 10, is_memory_step=True)
    builder.rank(0).memory(MemoryPoint.FORWARD_END, 5 * MIB, peak_allocated=8 * MIB)
    [step] = measure_memory(builder.build()).over_steps
    assert (step.step, step.highest_allocated_bytes) == (3, 8 * MIB)
