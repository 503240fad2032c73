"""Rows that wait for their times: long chains, work that never completes, the end."""

from __future__ import annotations

from typing import Any

from fsdp_inspect.recording.clocks import CudaClock, HostClock
from fsdp_inspect.recording.journal import Completion, Journal, later_of

from .virtual_device import MS, VirtualDevice, VirtualEvent, VirtualStream


class CountingDevice(VirtualDevice):
    num_queries = 0

    def query(self, event: VirtualEvent) -> bool:
        self.num_queries += 1
        return super().query(event)


def row(start: Any, end: Any, need: Any = -1) -> tuple[Any, ...]:
    return (*range(16), start, end, need)


def chained_rows(device: VirtualDevice, clock: CudaClock, length: int) -> list[tuple[Any, ...]]:
    """A chain of reductions with as many waits as HSDP has units; each wait begins at the last."""
    begin: Any = clock.mark()
    rows = []
    for _ in range(length):
        device.run("reduce", "x", MS)
        end = later_of(begin, clock.mark())
        rows.append(row(begin, end))
        begin = end
    return rows


def test_a_chain_of_waits_costs_queries_in_proportion_to_its_length() -> None:
    queries = {}
    for length in (50, 400):
        device = CountingDevice()
        clock = CudaClock(device)
        written: list[tuple[int, ...]] = []
        journal = Journal(clock, written.append)
        for each in chained_rows(device, clock, length):
            journal.add(each)
        journal.drain()  # nothing has completed
        device.spend(length * MS)
        journal.drain()
        assert len(written) == length
        queries[length] = device.num_queries
    assert queries[400] <= 9 * queries[50]  # eight times as long; 64 times if quadratic


def test_a_chain_longer_than_the_stack_is_written_in_order() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    written: list[tuple[int, ...]] = []
    journal = Journal(clock, written.append)
    rows = chained_rows(device, clock, 3000)
    journal.add(rows[-1])  # the last one first, so the whole chain is unresolved
    for each in rows[:-1]:
        journal.add(each)
    journal.drain()
    assert not written
    device.spend(3000 * MS)
    journal.drain()
    ends = [each[17] for each in written]
    assert ends == [3000 * MS, *(n * MS for n in range(1, 3000))]


def test_settling_waits_for_streams_other_than_the_current_one() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    written: list[tuple[int, ...]] = []
    journal = Journal(clock, written.append)
    side = VirtualStream(device)
    start = clock.mark(side)
    side.run(50 * MS)
    journal.add(row(start, clock.mark(side)))
    assert journal.settle(1.0) == 0
    assert written[0][17] - written[0][16] == 50 * MS


def test_settling_ends_at_its_deadline_when_work_never_completes() -> None:
    written: list[tuple[int, ...]] = []
    clock = HostClock()
    journal = Journal(clock, written.append)
    journal.add(row(1, Completion()))
    begin = clock.host_now()
    assert journal.settle(0.05) == 1
    assert clock.host_now() - begin >= 50 * MS
    assert not written
