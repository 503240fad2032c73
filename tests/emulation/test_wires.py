"""Does the CUDA wire keep streams busy in the right order? On streams that only write a log."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fsdp_inspect.emulation.network import Network
from fsdp_inspect.emulation.specification import parse_specification
from fsdp_inspect.emulation.wires import CudaWire, Message
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

    def new_stream(self) -> LoggedStream:
        self._num_streams += 1
        return LoggedStream(f"side{self._num_streams}", self.log)

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
        Network(parse_specification("world_size=2,bandwidth=1GB/s,latency=1us")), device
    )


def message(monkeypatch: pytest.MonkeyPatch, group: str = "shard") -> Message:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])

    class Group:
        group_name = group

    named: Any = Group()
    return Message(EventKind.ALL_GATHER, 2_000, named)


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
