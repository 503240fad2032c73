"""The trainer reads the numbers of a step on CUDA without waiting; tested on CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from instrumented_trainer import trainer
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.progress import StepReport
from instrumented_trainer.readings import (
    CudaReader,
    HostReader,
    Reading,
    StepNumbers,
    make_reader,
)
from instrumented_trainer.runtime import process_group, read_runtime
from instrumented_trainer.trainer import TrainingLoop, TrainingResult, prepare, train

SMALL = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 64,
    "seq_len": 16,
    "batch_size": 2,
    "steps": 5,
    "data": argparse.__file__,
    "record": False,
}
HOST_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
}


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's values on the host, which wait for the device on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.num_reads += func in HOST_READS
        return func(*args, **(kwargs or {}))


class SlowDevice:
    """Numbers arrive after the host has issued `lag` more steps, or when it waits."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.num_finished = 0
        self.num_waits = 0

    def start(self) -> int:
        return self.num_finished

    def finish(self, start: int, tensors: Sequence[torch.Tensor]) -> Reading:
        assert start == self.num_finished
        self.num_finished += 1
        return SlowReading(self, self.num_finished, [tensor.clone() for tensor in tensors])


class SlowReading:
    def __init__(self, device: SlowDevice, number: int, copies: list[torch.Tensor]) -> None:
        self.device = device
        self.number = number
        self.copies = copies

    def is_ready(self) -> bool:
        return self.device.num_finished >= self.number + self.device.lag

    def get(self) -> StepNumbers:
        self.device.num_waits += not self.is_ready()
        return StepNumbers(tuple(float(copy) for copy in self.copies), 1_000_000 * self.number)


class LoggedReporter:
    """A reporter that logs its calls in order."""

    def __init__(self) -> None:
        self.said: list[StepReport | str] = []

    def step(self, report: StepReport) -> None:
        self.said.append(report)

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None: ...

    @property
    def steps(self) -> list[StepReport]:
        return [report for report in self.said if isinstance(report, StepReport)]


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> LoggedReporter:
    reporter = LoggedReporter()
    monkeypatch.setattr(trainer, "make_reporter", lambda *args, **kwargs: reporter)
    return reporter


def train_on(reader: Any, monkeypatch: pytest.MonkeyPatch, **settings: object) -> TrainingResult:
    monkeypatch.setattr(trainer, "make_reader", lambda device: reader)
    run = prepare(check_settings({**SMALL, **settings}), read_runtime())
    with process_group(run.runtime):
        return train(run)


@pytest.mark.parametrize("lag", [1, 3])
def test_a_late_number_is_reported_under_its_own_step(
    lag: int, reporter: LoggedReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = train_on(HostReader(), monkeypatch)
    expected = [(report.step, report.loss, report.gradient_norm) for report in reporter.steps]
    reporter.said.clear()
    device = SlowDevice(lag)
    late = train_on(device, monkeypatch)
    assert [step for step, _, _ in expected] == [1, 2, 3, 4, 5]
    assert [(r.step, r.loss, r.gradient_norm) for r in reporter.steps] == expected
    assert late.losses == at_once.losses
    assert [r.step_time_ns for r in reporter.steps] == [n * 1_000_000 for n in range(1, 6)]
    assert device.num_waits == lag  # at the end only


def test_steps_are_reported_before_what_follows_them(
    reporter: LoggedReporter, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    folder = str(tmp_path / "checkpoints")
    train_on(
        SlowDevice(2),
        monkeypatch,
        eval_every=2,
        eval_batches=1,
        checkpoint_every=4,
        checkpoint_dir=folder,
    )
    order = [
        said.step if isinstance(said, StepReport) else said.split(":")[0].split(" /")[0]
        for said in reporter.said
    ][1:]
    assert order == [1, 2, "evaluation after step 2", 3, 4, "evaluation after step 4", "saved", 5]


def test_no_step_reads_a_tensor_on_the_host(
    reporter: LoggedReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    original = TrainingLoop.run_step

    def counted(loop: TrainingLoop, step: int) -> None:
        with HostReads() as mode:
            original(loop, step)
        reads.append(mode.num_reads)

    monkeypatch.setattr(TrainingLoop, "run_step", counted)
    train_on(SlowDevice(lag=100), monkeypatch, clip_norm=1.0, microbatches=2)
    assert reads == [0] * 5
    reads.clear()
    train_on(HostReader(), monkeypatch)
    assert reads == [2] * 5  # the loss and the norm, so the counter above works


class FakeEvent:
    """An event of a device at time `now_ns`, put on its stream at `issued_ns`."""

    now_ns = 0
    issued_ns = 0
    num_waits = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.ns = -1

    def record(self, stream: object) -> None:
        assert stream == "compute"
        FakeEvent.issued_ns += 1_000_000
        self.ns = FakeEvent.issued_ns

    def query(self) -> bool:
        return 0 <= self.ns <= FakeEvent.now_ns

    def synchronize(self) -> None:
        if not self.query():
            FakeEvent.num_waits += 1
            FakeEvent.now_ns = self.ns

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        return (end.ns - self.ns) / 1e6


@pytest.fixture
def cuda_reader(monkeypatch: pytest.MonkeyPatch) -> CudaReader:
    for name in ("now_ns", "issued_ns", "num_waits"):
        monkeypatch.setattr(FakeEvent, name, 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    return CudaReader(torch.device("cuda", 0))


def test_only_a_cpu_is_read_at_once() -> None:
    assert isinstance(make_reader(torch.device("cuda", 1)), CudaReader)
    assert isinstance(make_reader(torch.device("cpu")), HostReader)


def test_on_cuda_numbers_are_ready_when_the_device_is_past_their_copies(
    cuda_reader: CudaReader,
) -> None:
    norm = torch.tensor(0.5)
    reading = cuda_reader.finish(cuda_reader.start(), [norm])
    norm.zero_()  # the next step's
    FakeEvent.now_ns = 2_000_000
    assert not reading.is_ready()
    FakeEvent.now_ns = 3_000_000
    assert reading.is_ready()
    assert reading.get() == StepNumbers((0.5,), 1_000_000)
    assert FakeEvent.num_waits == 0


def test_on_cuda_only_asking_for_numbers_waits_for_them(cuda_reader: CudaReader) -> None:
    reading = cuda_reader.finish(cuda_reader.start(), [])
    assert not reading.is_ready()
    assert FakeEvent.num_waits == 0
    assert reading.get() == StepNumbers((), 1_000_000)
    assert FakeEvent.num_waits == 1


def test_on_cuda_copies_go_into_pinned_memory_without_blocking(cuda_reader: CudaReader) -> None:
    class Copies(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.blocking: list[bool] = []
            self.pinned: list[bool] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            assert func not in HOST_READS
            if func is torch.ops.aten.empty.memory_format and kwargs["device"].type == "cpu":
                self.pinned.append(kwargs["pin_memory"])
            if func is torch.ops.aten.copy_.default:
                self.blocking.append(not (len(args) > 2 and args[2]))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        loss = torch.empty((), device="cuda")
        with Copies() as copies:
            cuda_reader.finish(cuda_reader.start(), [loss])
    assert copies.blocking == [False]
    assert copies.pinned == [True]
