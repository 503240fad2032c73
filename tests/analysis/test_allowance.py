"""Test the estimated allowance for device memory that a forecast leaves out."""

import pytest

from fsdp_inspect.analysis.forecasts import default_allowance

GIB, MIB = 1 << 30, 1 << 20


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
