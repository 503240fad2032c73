from dataclasses import replace

import pytest

from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.trace.codes import MemoryPoint
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import InMemoryRun, RunBuilder

GIB = 1 << 30


def cuda_run():
    """Two samples: 10 GiB allocated, then 20 GiB allocated, 25 GiB active and 40 GiB reserved."""
    builder = RunBuilder(device_type="cuda")
    rank = builder.rank(0)
    rank.record.update(memory_from="cuda_allocator")
    rank.step(0, 0, 100)
    rank.memory(
        MemoryPoint.FORWARD_START, 10 * GIB, active=10 * GIB, reserved=30 * GIB,
        num_alloc_retries=3, num_ooms=0, inactive_split=GIB,
    )  # fmt: skip
    rank.memory(
        MemoryPoint.BACKWARD_START, 20 * GIB, active=25 * GIB, reserved=40 * GIB,
        num_alloc_retries=5, num_ooms=1, inactive_split=2 * GIB,
    )  # fmt: skip
    return builder.build()


def devices(*samples):
    rows = [
        {**dict.fromkeys(DeviceTable.DTYPES, -1), "time_ns": time, "gpu_memory_used": used}
        for time, used in samples
    ]
    return {0: DeviceTable.from_rows(rows)}


def test_fragmentation_is_what_is_reserved_and_idle_at_the_highest_sample():
    use = measure_allocator(cuda_run(), rank=0)
    assert (use.allocated_bytes, use.active_bytes, use.reserved_bytes) == (
        20 * GIB,
        25 * GIB,
        40 * GIB,
    )
    assert use.fragmentation_ratio == pytest.approx(15 / 40)
    assert use.inactive_split_bytes == 2 * GIB


def test_a_peak_between_two_samples_bounds_fragmentation():
    builder = RunBuilder(device_type="cuda")
    rank = builder.rank(0)
    rank.record.update(memory_from="cuda_allocator")
    rank.memory(
        MemoryPoint.BACKWARD_START, 20 * GIB, active=25 * GIB, reserved=40 * GIB,
        peak_allocated=30 * GIB, peak_reserved=42 * GIB,
    )  # fmt: skip
    use = measure_allocator(builder.build(), rank=0)
    assert use.is_between_samples
    assert (use.allocated_bytes, use.active_bytes, use.reserved_bytes) == (
        30 * GIB,
        30 * GIB,
        42 * GIB,
    )
    assert use.fragmentation_ratio == pytest.approx(12 / 42)


def test_retries_are_those_between_the_samples():
    use = measure_allocator(cuda_run(), rank=0)
    assert (use.num_alloc_retries, use.num_ooms) == (2, 1)


def test_what_the_device_holds_beyond_reserved_lies_outside_the_allocator():
    run = replace(cuda_run(), device_tables=devices((0, 31 * GIB), (1, 42 * GIB), (2, 41 * GIB)))
    use = measure_allocator(run, rank=0)
    assert (use.device_used_bytes, use.outside_allocator_bytes) == (42 * GIB, 2 * GIB)


def test_a_device_that_was_only_seen_before_the_first_sample_tells_no_difference():
    run = replace(cuda_run(), device_tables=devices((-5, 42 * GIB)))
    use = measure_allocator(run, rank=0)
    assert (use.device_used_bytes, use.outside_allocator_bytes) == (42 * GIB, None)


def test_recordings_without_these_counters_have_none_of_them():
    builder = RunBuilder(device_type="cuda")
    builder.rank(0).record.update(memory_from="cuda_allocator")
    builder.rank(0).memory(MemoryPoint.STEP_END, GIB, reserved=2 * GIB)
    use = measure_allocator(builder.build(), rank=0)
    assert (use.reserved_bytes, use.fragmentation_ratio) == (2 * GIB, None)
    assert (use.num_alloc_retries, use.inactive_split_bytes, use.device_used_bytes) == (None,) * 3


def test_on_cpu_there_is_no_allocator():
    builder = RunBuilder()
    builder.rank(0).memory(MemoryPoint.STEP_END, GIB)
    assert measure_allocator(builder.build(), rank=0) is None
    assert measure_allocator(builder.build(), rank=9) is None


class DamagedRun(InMemoryRun):
    def devices(self, rank):
        raise CorruptFileError("device.parquet of rank 0 is damaged.")


def test_damaged_device_samples_do_not_hide_the_allocator():
    use = measure_allocator(DamagedRun(**vars(cuda_run())), rank=0)
    assert (use.reserved_bytes, use.device_used_bytes) == (40 * GIB, None)
