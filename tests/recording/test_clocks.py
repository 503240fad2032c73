"""Device events as host times: bounds of the offset, reuse of events, several threads."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from fsdp_inspect.recording.clocks import CudaClock, TorchCudaBackend

from .virtual_device import MS, VirtualDevice, VirtualEvent


class CountingDevice(VirtualDevice):
    """A device that counts the created events and the queries of them."""

    num_events = 0
    num_queries = 0

    def new_event(self) -> VirtualEvent:
        self.num_events += 1
        return super().new_event()

    def query(self, event: VirtualEvent) -> bool:
        self.num_queries += 1
        return super().query(event)


class OneQueueDevice(VirtualDevice):
    """A device whose streams share one hardware queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""

    def record(self, event: VirtualEvent, stream: object) -> None:
        event.record(self.compute)


def train_steps(device: VirtualDevice, clock: CudaClock, count: int) -> None:
    """Run steps of 100 ms of device work, which the host issues in 1 ms and then awaits."""
    for _ in range(count):
        marks = [clock.mark() for _ in range(5)]
        device.run("forward", "x", 100 * MS)
        marks += [clock.mark() for _ in range(5)]
        device.spend(1 * MS)
        clock.advance()
        device.spend(100 * MS)
        for mark in marks:
            clock.read(mark)


class PreemptedDevice(VirtualDevice):
    """A device whose host loses its core right after each record."""

    def record(self, event: VirtualEvent, stream: Any) -> None:
        super().record(event, stream)
        self.spend(MS)


def test_a_mark_is_issued_before_the_device_runs_it() -> None:
    clock = CudaClock(PreemptedDevice())
    marks = [clock.mark() for _ in range(3)]
    assert all(mark.host_ns <= clock.read(mark) for mark in marks)


def test_a_long_run_makes_no_new_events() -> None:
    device = CountingDevice()
    clock = CudaClock(device)
    train_steps(device, clock, 3)
    made = device.num_events
    train_steps(device, clock, 50)
    assert device.num_events == made


def test_a_read_costs_the_same_after_many_anchors() -> None:
    device = CountingDevice()
    clock = CudaClock(device)
    train_steps(device, clock, 100)
    before = device.num_queries
    for _ in range(20):
        mark = clock.mark()
        device.spend(MS)
        clock.read(mark)
    assert device.num_queries - before <= 1  # at most one query of the newest anchor


def test_a_released_mark_gives_its_event_back_once() -> None:
    device = CountingDevice()
    clock = CudaClock(device)
    mark = clock.mark()
    clock.release(mark)
    clock.release(mark)
    assert clock._pool == [*{id(event): event for event in clock._pool}.values()]
    made = device.num_events
    clock.mark()
    assert device.num_events == made


def test_the_uncertainty_is_small_while_anchors_run_at_once() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    train_steps(device, clock, 200)
    mark = clock.mark()
    clock.advance()
    device.spend(1000)
    clock.mark()
    device.spend(MS)
    clock.read(mark)
    assert clock.uncertainty_ns < 0.1 * MS


def test_on_one_hardware_queue_times_keep_the_best_bound_and_the_uncertainty_says_so() -> None:
    device = OneQueueDevice()
    clock = CudaClock(device)
    # The queue is never empty, so each anchor runs 500 ms after the host has recorded it.
    device.run("forward", "x", 500 * MS)
    for _ in range(200):
        device.run("forward", "x", 100 * MS)
        mark = clock.mark()
        true_ns = mark.event.ns - device.clock_offset_ns
        clock.advance()
        device.spend(100 * MS)
    device.spend(1000 * MS)
    read_ns = clock.read(mark)
    # 20 s at the allowed drift of 20 ppm; the newest anchors alone are 500 ms off.
    assert abs(read_ns - true_ns) <= 0.4 * MS
    assert abs(read_ns - true_ns) <= clock.uncertainty_ns < 2 * MS


def test_the_uncertainty_grows_with_the_time_since_the_last_anchor() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    at_attach = clock.uncertainty_ns
    device.spend(100_000 * MS)
    assert clock.uncertainty_ns == pytest.approx(at_attach + 2 * 20e-6 * 100_000 * MS, rel=0.01)


def test_two_threads_never_get_one_event() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    for mark in [clock.mark() for _ in range(8)]:
        clock.release(mark)
    taken: list[list[int]] = [[], []]

    def take(own: list[int]) -> None:
        for _ in range(2000):
            mark = clock.mark()
            own.append(id(mark.event))
            held.append(mark)

    held: list[object] = []
    threads = [threading.Thread(target=take, args=(own,)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [*taken[0], *taken[1]]
    assert len(set(everything)) == len(everything) == 4000


def test_a_mark_that_is_read_meanwhile_is_ready_for_every_thread() -> None:
    """The watchdog asks about marks that the training thread reads or drops at the same moment."""
    device = VirtualDevice()
    clock = CudaClock(device)
    read, dropped = clock.mark(), clock.mark()
    device.spend(MS)
    clock.read(read)
    clock.release(dropped)
    assert clock.ready(read)
    assert clock.ready(dropped)


@pytest.mark.parametrize(("priorities", "chosen"), [((0, -5), -5), ((0, -1), 0)])
def test_the_idle_stream_is_of_a_priority_that_fsdp_does_not_use(
    monkeypatch: pytest.MonkeyPatch, priorities: tuple[int, int], chosen: int
) -> None:
    # Pinned: torch 2.13, `FSDPCommContext.lazy_init` uses the priorities 0 and -1.
    class Stream:
        def __init__(self, device: object, priority: int) -> None:
            self.priority = priority

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return priorities

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    assert TorchCudaBackend("cuda:0").new_stream().priority == chosen
    source = inspect.getsource(FSDPCommContext.lazy_init)
    assert "high_priority = -1" in source
