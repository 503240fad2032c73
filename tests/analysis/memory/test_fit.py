"""Whether a need fits: its interval, and the device memory that tensors cannot have."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fsdp_inspect.analysis.memory import fit
from fsdp_inspect.analysis.memory.fit import (
    DeviceOverhead,
    FitVerdict,
    default_allowance,
    judge_fit,
    measure_allocatable,
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


def test_tensors_get_the_device_without_what_is_outside_the_allocator(monkeypatch):
    run = steady_run(world_size=2)
    ranks = [each.model_copy(update={"device_memory_bytes": 80 * GIB}) for each in run.ranks]
    run = replace(run, ranks=tuple(ranks))
    on_gpu = replace(run, manifest=run.manifest.model_copy(update={"device_type": "cuda"}))
    estimated = default_allowance(0, world_size=2).bytes

    assert measure_allocatable(run, 0) == 80 * GIB
    assert measure_allocatable(steady_run(), 0) is None
    assert measure_allocatable(on_gpu, 0) == 80 * GIB - estimated
    use = SimpleNamespace(outside_allocator_bytes=2 * GIB)
    monkeypatch.setattr(fit, "measure_allocator", lambda run, rank: use)
    assert measure_allocatable(on_gpu, 0) == 78 * GIB
