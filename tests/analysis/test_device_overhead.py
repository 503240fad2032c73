"""The allowance for memory that the device needs outside the allocator."""

import pytest

from fsdp_inspect.analysis.forecasts import DeviceOverhead, measure_device_overhead
from fsdp_inspect.errors import MissingDataError
from tests.builders import steady_run


def test_what_was_not_recorded_counts_nothing():
    assert DeviceOverhead("run", 0, 7, None).bytes == 7
    assert DeviceOverhead("run", 0, 7, 5).bytes == 12


def test_a_run_on_cpu_is_refused_with_what_to_do():
    with pytest.raises(MissingDataError, match=r"CUDA allocator samples missing.*--allowance"):
        measure_device_overhead(steady_run())
