"""The CUDA wire keeps streams busy in the right order, tested on streams that write a log."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_inspect.emulation.collectives import CudaWire, EmulatedMessage
from fsdp_inspect.emulation.network import EmulatedNetwork, parse_specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.trace.codes import EventKind


class LoggedStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log
        self._events = 0

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")

    def wait_stream(self, stream: LoggedStream) -> None:
        self._log.append(f"{self.name} waits for {stream.name}")

    def record_event(self) -> str:
        self._events += 1
        return f"{self.name}#{self._events}"


class LoggedDevice:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = LoggedStream("compute", self.log)
        self._num_streams = 0

    def current_stream(self) -> LoggedStream:
        return self.stream

    def new_stream(self, *, high_priority: bool = False) -> LoggedStream:
        if high_priority:
            return LoggedStream("copies", self.log)
        self._num_streams += 1
        return LoggedStream(f"side{self._num_streams}", self.log)

    @contextmanager
    def use(self, stream: LoggedStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def copy(self) -> None:
        """Do the work of the fake process group."""
        self.log.append(f"{self.stream.name} copies")

    def spin(self, duration_ns: int, stream: LoggedStream) -> None:
        self.log.append(f"{stream.name} spins {duration_ns}")

    def switch_to(self, name: str) -> None:
        self.stream = LoggedStream(name, self.log)


@pytest.fixture
def device() -> LoggedDevice:
    return LoggedDevice()


@pytest.fixture
def wire(device: LoggedDevice) -> CudaWire:
    return CudaWire(
        EmulatedNetwork(parse_specification("world_size=2,bandwidth=1GB/s,latency=1us")), device
    )


def message(monkeypatch: pytest.MonkeyPatch, group: str = "shard") -> EmulatedMessage:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])

    class Group:
        group_name = group

    named: Any = Group()
    return EmulatedMessage(EventKind.ALL_GATHER, 2_000, named)


def test_a_transfer_keeps_the_stream_of_its_collective_busy(
    wire: CudaWire, device: LoggedDevice, monkeypatch: pytest.MonkeyPatch
):
    device.switch_to("gather")
    wire.defer(message(monkeypatch))

    assert device.log == ["gather spins 2000"]


def test_transfers_of_one_communicator_run_one_after_the_other(
    wire: CudaWire, device: LoggedDevice, monkeypatch: pytest.MonkeyPatch
):
    device.switch_to("gather")
    wire.defer(message(monkeypatch))
    device.switch_to("reduce")
    wire.defer(message(monkeypatch))
    wire.defer(message(monkeypatch, "replicate"))

    assert device.log == [
        "gather spins 2000",
        "reduce waits for gather#1",
        "reduce spins 2000",
        "reduce spins 2000",
    ]


def test_an_asynchronous_transfer_holds_only_the_stream_that_waits_for_it(
    wire: CudaWire, device: LoggedDevice, monkeypatch: pytest.MonkeyPatch
):
    work, transfer = wire.handle(message(monkeypatch), inner=None)
    before = list(device.log)
    work.wait()

    assert transfer is None
    assert before == ["side1 waits for compute", "side1 spins 2000"]
    assert device.log[len(before) :] == ["compute waits for side1#1"]


def test_copies_of_the_fake_group_run_beside_the_transfer_and_belong_to_it(
    wire: CudaWire, device: LoggedDevice, monkeypatch: pytest.MonkeyPatch
):
    device.switch_to("gather")
    with wire.copying():
        device.copy()
    wire.defer(message(monkeypatch))
    wire.defer(message(monkeypatch, "replicate"))

    assert device.log == [
        "copies waits for gather",
        "copies copies",
        "gather spins 2000",
        "gather waits for copies#1",
        "gather spins 2000",
    ]


def test_an_asynchronous_transfer_keeps_its_tensors_until_it_is_waited_for(
    wire: CudaWire, device: LoggedDevice, monkeypatch: pytest.MonkeyPatch
):
    tensor = torch.ones(1)
    alive = weakref.ref(tensor)
    gather = message(monkeypatch)
    gather.tensors = [tensor]
    with wire.copying():
        device.copy()
    work, _ = wire.handle(gather, inner=None)
    del tensor, gather

    assert device.log[-2:] == ["side1 spins 2000", "side1 waits for copies#1"]
    assert alive() is not None
    work.wait()
    assert alive() is None


def test_a_collective_of_torch_is_carried_with_its_copies(
    device: LoggedDevice, monkeypatch: pytest.MonkeyPatch
):
    with emulate(parse_specification("world_size=2,bandwidth=1GB/s,latency=1us")) as emulation:
        dist.init_process_group()
        wire = CudaWire(EmulatedNetwork(emulation.specification), device)
        monkeypatch.setattr(emulation._collectives, "_wire", lambda _: wire)
        output = torch.zeros(500)
        work = dist.all_gather_single(output, torch.ones(250), async_op=True)
        copied = output.sum().item()
        work.wait()
        dist.destroy_process_group()

    assert copied == 500
    assert device.log == [
        "copies waits for compute",
        "side1 waits for compute",
        "side1 spins 2000",
        "side1 waits for copies#1",
        "compute waits for side1#1",
    ]
