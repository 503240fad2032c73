"""A limit of the memory, the report of a failed allocation, and failures of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.diagnosis.fitting_plans import NoPlans, search_plans
from fsdp_inspect.recording import attachment
from fsdp_inspect.recording.failure import is_out_of_memory
from fsdp_inspect.recording.launcher import parse_arguments
from fsdp_inspect.recording.out_of_memory import (
    CudaLimit,
    FollowedStep,
    LimitFailure,
    Surroundings,
    find_limit_failure,
    make_limit_error,
    make_record,
    parse_request,
)
from fsdp_inspect.recording.storage_log import Moment, StorageLog
from fsdp_inspect.recording.storage_tracker import FailedAllocation, find_storages
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.report.out_of_memory import describe_fitting_plans, describe_memory_at_failure
from fsdp_inspect.run import Run
from fsdp_inspect.store import writer
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.reduction.order_wording import shorten_place
from fsdp_inspect.store.schema import OUT_OF_MEMORY_FILE
from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.writing import replace_file

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.20 GiB is free."
)
KIB = 1024


def train(tmp_path: Path, *, steps: int = 3, **options: Any) -> Path:
    """Train until the limit is exceeded, by a larger batch in the last step."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run"
    limit = {"device_memory": "512KiB", "print_verdict": False}

    def loop() -> None:
        with Recorder(model, path=path, **limit, **options) as recorder:  # type: ignore[arg-type]
            for step in range(steps):
                with recorder.step():
                    model(torch.ones(8 if step < steps - 1 else 2000, 64)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        loop()
    return path


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (CUDA_MESSAGE, 2 << 30),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.80 GiB total)", 20 << 20),
        ("XPU out of memory. Tried to allocate 512.00 KiB.", 512 << 10),
        ("Tried to allocate 96 bytes", 96),
        ("out of memory", None),
    ],
)
def test_the_request_is_read_from_torch_s_message(message: str, expected: int | None) -> None:
    assert parse_request(message) == expected


def failure_of(num_bytes: int = KIB) -> LimitFailure:
    moment = Moment(-1, Phase.FORWARD, 0)
    log = StorageLog()
    log.begin(moment)
    return LimitFailure(4, 0, 9 * KIB, FailedAllocation(num_bytes, 8 * KIB, 0, moment, 0, log))


def test_a_failure_is_found_behind_an_error_that_was_raised_again() -> None:
    failure = failure_of()
    again = RuntimeError("training failed")
    again.__cause__ = make_limit_error(failure)
    assert find_limit_failure(again) is failure
    assert find_limit_failure(ValueError("other")) is None


@pytest.mark.parametrize("value", [0, -1, "0GiB", "much", 1.5, True])
def test_an_invalid_limit_is_refused_with_its_value(
    one_rank: None, tmp_path: Path, value: Any
) -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="device_memory must be an amount above 0"):
        Recorder(model, path=tmp_path / "run", device_memory=value)


@pytest.mark.parametrize("value", ["0GiB", "much", "2", "-1GiB"])
def test_the_launcher_refuses_an_invalid_limit(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([f"--device-memory={value}", __file__])
    assert f"invalid amount of memory: {value!r}. Expected an amount above 0 with a unit" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_the_report_is_written_and_said(
    one_rank: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(train(tmp_path))
    record = run.out_of_memory(0)
    assert record is not None
    assert (record.step, record.phase, record.limit_bytes) == (2, "outside", 512 * KIB)
    assert record.requested_bytes == 2000 * 64 * 4  # the batch itself
    assert Path(record.location.rpartition(":")[0]).name == "test_out_of_memory.py"
    assert record.reference is not None
    assert record.reference.step == 1
    assert "Out of memory between phases, step 2: allocating 500 KiB" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_leaves_the_error_and_the_diagnosis(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes, *, durable: bool = False) -> None:
        if path.name == OUT_OF_MEMORY_FILE:
            raise OSError(28, "No space left on device")
        replace_file(path, content, durable=durable)

    monkeypatch.setattr(writer, "replace_file", full)
    opened = open_run(train(tmp_path))
    assert opened.out_of_memory(0) is None
    found = Run(opened).diagnose()
    assert found.problem == "out of memory"
    assert "Tried to allocate 500 KiB" in found.failure


def test_a_request_of_the_script_that_the_host_refuses_is_reported_with_its_line(
    one_rank: None, tmp_path: Path
) -> None:
    model = fully_shard(nn.Linear(64, 64))

    def loop() -> None:
        with Recorder(model, path=tmp_path / "run", print_verdict=False) as recorder:
            for _ in range(3):
                with recorder.step():
                    model(torch.ones(8, 64)).sum().backward()
                torch.empty(1 << 50, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        loop()
    found = Run(open_run(tmp_path / "run")).diagnose()
    text = describe_diagnosis(found)
    assert "allocating 1,024 TiB failed at" in text.sentence
    assert "test_out_of_memory.py" in text.sentence
    assert "the request is made outside the units" in text.next[0]


def test_an_error_of_the_host_says_nothing_of_a_devices_memory() -> None:
    assert is_out_of_memory(MemoryError(), torch.device("cpu"))
    assert not is_out_of_memory(MemoryError(), torch.device("cuda"))
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA_MESSAGE), torch.device("cuda"))


def test_a_report_that_fails_is_noted(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("an internal error")

    monkeypatch.setattr(attachment, "make_record", fail)
    [record] = open_run(train(tmp_path)).ranks
    assert any("an internal error" in problem for problem in record.problems)
    assert record.failure is not None
    assert record.failure.startswith("OutOfMemoryError at step 2")


def test_steps_under_a_limit_are_timed(one_rank: None, tmp_path: Path) -> None:
    run = Run(open_run(train(tmp_path, steps=8, warmup_steps=1)))
    assert run.steps.memory == (1,)
    assert run.steps.timed == (2, 3, 4, 5, 6)


def test_what_every_step_leaves_behind_is_found(one_rank: None, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(64, 64))
    kept: list[torch.Tensor] = []

    def loop() -> None:
        with Recorder(model, path=tmp_path / "run", device_memory="256KiB") as recorder:
            while True:
                with recorder.step():
                    model(torch.ones(8, 64)).sum().backward()
                    kept.append(torch.ones(4, KIB))  # 16 KiB that stay allocated

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    found = Run(open_run(tmp_path / "run")).diagnose().out_of_memory
    assert found is not None
    [leak] = found.leak
    assert Path(leak.place.rpartition(":")[0]).name == "test_out_of_memory.py"
    now, before = found.record.resting_now, found.record.resting_before
    assert now is not None
    assert before is not None
    assert leak.bytes == (now.step - before.step) * 16 * KIB
    text = " ".join(describe_memory_at_failure(found))
    assert "Between steps, memory grew from" in text
    assert "Each step leaves 16.0 KiB allocated." in text
    searched = search_plans(open_run(tmp_path / "run"), found, name_file=str)
    assert searched.reason is NoPlans.LEAK
    [said] = describe_fitting_plans(found, searched)
    assert said.startswith("No plan fits for long: each step leaves 16.0 KiB allocated. Stop")
    assert "test_out_of_memory.py" in said
    verdict = Run(open_run(tmp_path / "run")).summary().verdict
    line = shorten_place(leak.place)
    assert verdict.because.endswith(f"most of it is allocated at {line}.")
    assert verdict.next_steps[0].startswith(f"Stop keeping the tensors of {line} over steps")


def test_memory_that_rises_once_is_no_leak(one_rank: None, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(64, 64))
    kept: list[torch.Tensor] = []

    def loop() -> None:
        with Recorder(model, path=tmp_path / "run", device_memory="256KiB") as recorder:
            for step in range(12):
                with recorder.step():
                    model(torch.ones(8, 64)).sum().backward()
                    if step == 4:
                        kept.append(torch.ones(32, KIB))
                    if step == 11:
                        torch.ones(64, KIB)

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    found = Run(open_run(tmp_path / "run")).diagnose().out_of_memory
    assert found is not None
    assert found.leak
    assert found.steady is None


class Opaque(torch.Tensor):
    """A tensor of another library that hides its storage."""

    def untyped_storage(self) -> torch.UntypedStorage:
        raise AttributeError("no storage")


def test_tensors_that_hide_their_storage_are_left_out() -> None:
    hidden = torch.ones(3).as_subclass(Opaque)
    assert find_storages()
    del hidden


def test_a_memory_step_counts_what_earlier_steps_keep(one_rank: None, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(64, 64))
    kept: list[torch.Tensor] = []
    before = torch.ones(128, KIB)  # a data set
    with Recorder(model, path=tmp_path / "run", memory_steps=[2, 6]) as recorder:
        for _ in range(8):
            with recorder.step():
                model(torch.ones(8, 64)).sum().backward()
                kept.append(torch.ones(4, KIB))
    samples = open_run(tmp_path / "run").memory(0)
    peaks = [int(samples.peak_allocated[samples.step == step].max()) for step in (2, 6)]
    assert peaks[1] - peaks[0] == 4 * 16 * KIB
    assert peaks[1] < before.nbytes


# --- CUDA, without a device


class Counters:
    """An allocator with known counters."""

    def read(self) -> Any:
        return (6 * KIB, 8 * KIB, 6 * KIB, 7 * KIB, 8 * KIB, 0, 0, 1)


class FakeSession:
    """The position in the training."""

    step, microbatch = 3, 1

    def position(self, frames: object = ()) -> tuple[int, int]:
        return 0, int(Phase.BACKWARD)


def test_the_report_on_cuda_has_the_allocator_s_state(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [{"size": 512, "state": "inactive"}, {"size": 4096, "state": "active_allocated"}]
    segments = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": [{**blocks[0]}]}]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * KIB, 10 * KIB))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    moment = Moment(-1, Phase.OUTSIDE, 0)
    log = StorageLog()
    log.begin(moment)
    log.finish(moment)
    where = Surroundings(
        session=FakeSession(),  # type: ignore[arg-type]
        units=[],
        handles=[],
        optimizers=[],
        counters=Counters(),
        device=torch.device("cuda", 0),
        limit_bytes=None,
        followed=None,
        resting_before=None,
        resting_bytes=(),
        memory_step_peak=FollowedStep(1, log).at_begin(str),
        name_place=lambda number: "",
    )
    identity = {"run_id": "r", "rank": 0, "attempt": 0}
    record = make_record(torch.OutOfMemoryError(CUDA_MESSAGE), identity, where, "train.py:7")
    assert (record.allocated_bytes, record.reserved_bytes) == (6 * KIB, 8 * KIB)
    assert (record.largest_free_block_bytes, record.device_free_bytes) == (512, KIB)
    assert (record.limit_bytes, record.requested_bytes) == (10 * KIB, 2 << 30)
    assert (record.step, record.microbatch, record.phase) == (3, 1, "backward")
    assert (record.location, record.live_from) == ("train.py:7", "")


def test_cuda_is_limited_by_its_own_allocator_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fractions: list[float] = []
    properties = type("Properties", (), {"total_memory": 80 * KIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: fractions.append(fraction),
    )
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device: 0.9, raising=False
    )
    limit = CudaLimit(torch.device("cuda", 0), 20 * KIB)
    assert limit.start() is None
    limit.stop()
    limit.stop()
    assert fractions == [0.25, 0.9]
    problem = CudaLimit(torch.device("cuda", 0), 90 * KIB).start()
    assert problem is not None
    assert "has no effect: cuda:0 has 80.0 KiB" in problem
