"""The times of emulated transfers: queues on a clock that the tests set."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.emulation.network import EmulatedNetwork, parse_specification, sleep_until
from fsdp_inspect.trace.codes import EventKind

ALL = range(8)


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def make_network(clock: Clock) -> EmulatedNetwork:
    return EmulatedNetwork(parse_specification("world_size=8,bandwidth=1GB/s,latency=1us"), clock)


@pytest.mark.parametrize(
    ("kind", "expected_ns"),
    [
        (EventKind.ALL_GATHER, 1_000 + 7_000),
        (EventKind.REDUCE_SCATTER, 1_000 + 7_000),
        (EventKind.ALL_REDUCE, 1_000 + 14_000),
        (EventKind.ALL_TO_ALL, 1_000 + 7_000),
        (EventKind.BROADCAST, 1_000 + 8_000),
        (EventKind.BARRIER, 1_000),
    ],
)
def test_a_transfer_takes_latency_and_its_bus_bytes(kind: EventKind, expected_ns: int):
    assert make_network(Clock()).duration_ns(kind, 8_000, ALL) == expected_ns


def test_a_group_of_one_rank_sends_nothing():
    assert make_network(Clock()).duration_ns(EventKind.ALL_GATHER, 8_000, [0]) == 0


def test_collectives_of_one_group_queue_and_those_of_two_do_not():
    network = make_network(Clock())
    first, second, other = (
        network.issue(EventKind.ALL_GATHER, 8_000, group, ALL) for group in ("a", "a", "b")
    )

    assert (first.start_ns, first.end_ns) == (0, 8_000)
    assert (second.issue_ns, second.start_ns, second.end_ns) == (0, 8_000, 16_000)
    assert other.start_ns == 0


def test_a_transfer_waits_for_what_it_sends():
    transfer = make_network(Clock()).issue(EventKind.ALL_REDUCE, 8_000, "a", ALL, not_before_ns=500)

    assert (transfer.issue_ns, transfer.start_ns) == (0, 500)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 10**6)), max_size=30))
def test_a_link_carries_one_transfer_at_a_time_in_the_order_of_issue(
    issues: list[tuple[int, int]],
):
    clock = Clock()
    network = make_network(clock)
    transfers = []
    for pause_ns, num_bytes in issues:
        clock.ns += pause_ns
        transfers.append(network.issue(EventKind.ALL_GATHER, num_bytes, "a", ALL))

    assert all(before.end_ns <= after.start_ns for before, after in pairwise(transfers))
    assert all(t.start_ns == max(t.issue_ns, before.end_ns) for before, t in pairwise(transfers))


def test_late_sleepers_do_not_delay_the_link():
    clock = Clock()
    network = make_network(clock)
    network.issue(EventKind.ALL_GATHER, 8_000, "a", ALL)
    queued = network.issue(EventKind.ALL_GATHER, 8_000, "a", ALL)
    clock.ns = 9_000  # woke up late from the first transfer

    assert queued.end_ns == 16_000


def test_the_first_need_of_a_transfer_is_kept():
    clock = Clock()
    network = make_network(clock)
    transfer = network.issue(EventKind.ALL_GATHER, 8_000, "a", ALL)
    clock.ns = 5_000
    network.wait(transfer)
    clock.ns = 7_000
    network.wait(transfer)

    assert transfer.need_ns == 5_000
    assert not network.has_ended(transfer)


def test_a_sleep_never_ends_early():
    for pause_ns in (0, 50_000, 400_000, 2_000_000):
        deadline = time.perf_counter_ns() + pause_ns
        sleep_until(deadline)
        assert time.perf_counter_ns() >= deadline
