from dataclasses import replace

import pytest

from fsdp_inspect.analysis.trust import RunDelay, Trust, measure_trust
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
