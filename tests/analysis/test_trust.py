from dataclasses import replace

import pytest

from fsdp_inspect.analysis.trust import Paging, RunDelay, Trust, measure_trust
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
    found = measure_trust(run_with(r0=[(100, 7), (200, 9)], r1=[(100, -1), (150, 50), (250, 75)]))
    assert found.run_delay == RunDelay(1, pytest.approx(0.25))


def test_nothing_is_told_of_a_scheduler_that_was_not_read_twice():
    assert measure_trust(run_with(r0=[(100, -1), (200, 9)])).run_delay is None


def test_a_counter_that_began_anew_tells_nothing():
    assert measure_trust(run_with(r0=[(100, 50), (200, 9)])).run_delay is None


def paging_run(*samples):
    """Samples of the second, the major page faults and the MiB in swap, of one rank."""
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 100)
    rows = [
        dict.fromkeys(DeviceTable.DTYPES, -1)
        | {"time_ns": second * 10**9, "major_faults": faults, "process_swap": swap << 20}
        for second, faults, swap in samples
    ]
    return replace(builder.build(), device_tables={0: DeviceTable.from_rows(rows)})


def test_pages_read_from_a_disk_are_a_caveat_of_every_time():
    trust = measure_trust(paging_run((0, 0, 0), (2, 10, 0), (4, 10, 2048), (6, 410, 2048)))
    assert trust.paging == Paging(0, pytest.approx(200), 2048 << 20)
    assert "Rank 0 reads 200 pages per second from a disk and has 2.00 GiB" in trust.time_caveat
    assert "no offload" in trust.time_caveat
    mapped = measure_trust(paging_run((0, 0, 0), (2, 10, 0), (4, 10, 0), (6, 410, 0)))
    assert "swap" not in mapped.time_caveat
    assert "memory-mapped files" in mapped.time_caveat


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([(0, 0, 0), (1, 9000, 0), (4, 9010, 0), (6, 9020, 0)], id="at the start"),
        pytest.param([(0, 0, 900), (3, 0, 900), (6, 0, 900), (9, 0, 900)], id="swapped, not read"),
        pytest.param([(0, 0, 0), (1, 900, 0)], id="too short"),
        pytest.param([(0, -1, -1), (3, -1, -1), (6, -1, -1)], id="unknown"),
    ],
)
def test_a_process_that_does_not_wait_for_pages_has_no_caveat(samples):
    assert measure_trust(paging_run(*samples)).time_caveat is None


@pytest.mark.parametrize(("cost_ratio", "is_first"), [(0.0, True), (0.6, True), (0.7, False)])
def test_missing_cores_come_before_a_cause_that_costs_less(cost_ratio, is_first):
    trust = Trust(run_delay=RunDelay(0, 0.69))
    assert trust.are_cores_first(cost_ratio) == is_first


@pytest.mark.parametrize(
    ("here", "world_size", "words"),
    [
        pytest.param(range(4), 4, None, id="all"),
        pytest.param([0, 1, 3], 4, "Rank 2 is not recorded, so a wait for it", id="one"),
        pytest.param([0], 3, "Ranks 1-2 are not recorded, so a wait for them", id="two"),
        pytest.param([0], 1000, "999 ranks are not recorded", id="most"),
    ],
)
def test_a_wait_for_a_rank_that_is_not_recorded_is_a_caveat(here, world_size, words):
    builder = RunBuilder(world_size=world_size)
    for rank in here:
        builder.rank(rank).step(0, 0, 100)
    caveat = measure_trust(builder.build()).wait_caveat
    assert (caveat or "").startswith(words or "")
    assert (caveat is None) == (words is None)


@pytest.mark.parametrize(
    ("error", "higher", "low", "high"),
    [(0.0, 0.0, 980, 1020), (None, 0.1, 980, 1120), (-0.01, 0.0, 970, 1030)],
)
def test_the_interval_of_a_peak_has_a_least_width_and_decides_what_fits(error, higher, low, high):
    trust = Trust(memory_error=error, higher_peak_ratio=higher)
    assert trust.peak_range_bytes(1000) == (low, high)
    assert high == 1000 * (1 + trust.memory_margin)
