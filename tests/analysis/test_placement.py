"""Ranks that share cores, and ranks that run far from their GPU."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.analysis.placement import (
    FarDevice,
    SharedCores,
    find_far_device,
    find_shared_cores,
)
from fsdp_inspect.trace.host_work import HostActivity, parse_cores, write_cores
from fsdp_inspect.trace.run import ClockPair, RankRecord


def record(rank: int, host: str = "a", **work: Any) -> RankRecord:
    return RankRecord(
        rank=rank,
        world_size=4,
        host=host,
        clock_start=ClockPair(monotonic_ns=0, unix_ns=0, uncertainty_ns=0),
        host_work=HostActivity(**work),
    )


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        (
            [record(0, num_threads=4, num_cores=4, cores="0-3"), record(1, num_threads=4)],
            SharedCores(threads=4, cores=4, ranks=1),
        ),
        (
            [record(rank, num_threads=4, num_cores=4, cores="0-3") for rank in range(4)],
            SharedCores(threads=16, cores=4, ranks=4),
        ),
        (
            [
                record(0, num_threads=2, num_cores=2, cores="0,2"),
                record(1, num_threads=8, num_cores=2, cores="1,3"),
                record(2, num_threads=3, num_cores=2, cores="2,5"),
                record(3, "b", num_threads=9, num_cores=2, cores="0,2"),
            ],
            SharedCores(threads=5, cores=3, ranks=2),
        ),
        ([record(0, num_threads=8, num_cores=1)], SharedCores(threads=8, cores=1, ranks=1)),
        ([record(0, num_threads=8)], None),
    ],
)
def test_ranks_of_one_host_share_cores_on_which_both_may_run(
    ranks: list[RankRecord], shared: SharedCores | None
) -> None:
    assert find_shared_cores(ranks, 0) == shared


def test_only_a_gpu_of_another_node_is_far() -> None:
    near = record(0, core_nodes=[0, 1], device_node=1)
    far = [record(rank, core_nodes=[0], device_node=1) for rank in (2, 3)]
    unknown = [record(4, core_nodes=[0]), record(5, device_node=1)]
    assert find_far_device([near, *unknown]) is None
    assert find_far_device([near, *unknown, *far]) == FarDevice(2, (0,), 1, num_ranks=2)


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_cores_is_read_as_it_is_written(cores: frozenset[int]) -> None:
    assert parse_cores(write_cores(cores)) == cores


@pytest.mark.parametrize("text", ["", "\n", "a", "1-", "-3", "1-2-3", "0-99999999999", "3,,4"])
def test_a_list_that_linux_does_not_write_names_no_core(text: str) -> None:
    assert parse_cores(text) == frozenset()


def test_lists_of_linux_are_read() -> None:
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8}
