"""Whether a need fits: its interval, and the device memory that tensors cannot have."""

from dataclasses import replace

import pytest

from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.memory.fit import (
    DeviceOverhead,
    FitVerdict,
    allocatable_bytes,
    default_allowance,
    judge_fit,
    measure_device_overhead,
)
from fsdp_inspect.errors import MissingDataError
from tests.builders import steady_run

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [
        (89, FitVerdict.DEVICE),
        (90, FitVerdict.UNKNOWN),
        (109, FitVerdict.UNKNOWN),
        (110, FitVerdict.FITS),
    ],
)
def test_only_a_budget_outside_the_interval_gives_an_answer(limit, verdict):
    assert judge_fit(90, 110, limit) is verdict


def test_the_allowance_has_a_share_of_the_peak_the_context_and_the_libraries():
    allowance = default_allowance(50 * GIB, world_size=8)
    assert allowance.reserved_bytes == 10 * GIB
    assert allowance.context_bytes == pytest.approx(1.3 * GIB, abs=1)
    assert allowance.library_bytes == 64 * MIB + 256 * MIB
    assert allowance.bytes == (
        allowance.reserved_bytes + allowance.context_bytes + allowance.library_bytes
    )


def test_one_rank_has_no_buffers_of_nccl():
    assert default_allowance(0, world_size=1).library_bytes == 64 * MIB


def test_what_was_not_recorded_counts_nothing():
    assert DeviceOverhead("run", 0, 7, None).bytes == 7
    assert DeviceOverhead("run", 0, 7, 5).bytes == 12


def test_a_run_on_cpu_is_refused_with_what_to_do():
    with pytest.raises(MissingDataError, match=r"CUDA allocator samples missing.*--allowance"):
        measure_device_overhead(steady_run())


def test_tensors_get_the_device_without_what_is_outside_the_allocator():
    manifest = steady_run().manifest
    on_gpu = manifest.model_copy(update={"device_type": "cuda"})
    use = AllocatorUse(
        rank=0, step=0, allocated_bytes=1, active_bytes=1, reserved_bytes=1,
        fragmentation_ratio=0.0, inactive_split_bytes=0, num_alloc_retries=0, num_ooms=0,
        device_used_bytes=3 * GIB, outside_allocator_bytes=2 * GIB,
    )  # fmt: skip

    estimated = default_allowance(0, world_size=manifest.world_size).bytes
    assert allocatable_bytes(on_gpu, 80 * GIB, use) == 78 * GIB
    assert allocatable_bytes(on_gpu, 80 * GIB, None) == 80 * GIB - estimated
    unknown = replace(use, outside_allocator_bytes=None)
    assert allocatable_bytes(on_gpu, 80 * GIB, unknown) == 80 * GIB - estimated
    assert allocatable_bytes(on_gpu, None, use) is None
    assert allocatable_bytes(manifest, 80 * GIB, None) == 80 * GIB
