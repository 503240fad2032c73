from dataclasses import replace

import pytest

from fsdp_inspect.analysis.run_delay import measure_run_delay
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import RunBuilder


def run_with(**delays):
    """Samples of time and run delay, by rank; -1: the scheduler's counter is unknown."""
    builder = RunBuilder()
    for name in delays:
        builder.rank(int(name[1:])).step(0, 0, 100)
    tables = {
        int(name[1:]): DeviceTable.from_rows(
            [
                {**dict.fromkeys(DeviceTable.DTYPES, -1), "time_ns": time, "run_delay_ns": delay}
                for time, delay in samples
            ]
        )
        for name, samples in delays.items()
    }
    return replace(builder.build(), device_tables=tables)


def test_the_rank_that_waits_most_for_a_core_is_told_with_its_share():
    found = measure_run_delay(
        run_with(r0=[(100, 7), (200, 9)], r1=[(100, -1), (150, 50), (250, 75)])
    )
    assert found is not None
    assert (found.rank, found.run_delay_ratio) == (1, pytest.approx(0.25))


def test_nothing_is_told_of_a_scheduler_that_was_not_read_twice():
    assert measure_run_delay(run_with(r0=[(100, -1), (200, 9)])) is None


def test_a_counter_that_began_anew_tells_nothing():
    assert measure_run_delay(run_with(r0=[(100, 50), (200, 9)])) is None
