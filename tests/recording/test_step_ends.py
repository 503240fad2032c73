"""The end of a step without `recorder.step()`: all kinds of optimizer use, in one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import EventTable

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    fully_shard(model[0])
    return fully_shard(model)


def record(model: nn.Module, folder: Path) -> Recorder:
    return Recorder(model, path=folder, memory_steps=(), device_interval_s=0, print_verdict=False)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 8)).square().sum()


def events_of(folder: Path, kind: EventKind) -> EventTable:
    events = open_run(folder).events(0)
    return events.where(events.kind == kind)


def steps_of(folder: Path) -> list[int]:
    return [int(step) for step in events_of(folder, EventKind.STEP).step]


def test_two_optimizers_in_a_row_end_one_step(model: nn.Module, tmp_path: Path) -> None:
    halves = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[0], model[2])]

    with record(model, tmp_path / "run"):
        for _ in range(STEPS):
            loss_of(model).backward()
            for optimizer in halves:
                optimizer.step()
                optimizer.zero_grad()

    assert steps_of(tmp_path / "run") == [0, 1, 2, 3]
    assert len(events_of(tmp_path / "run", EventKind.OPTIMIZER)) == 2 * STEPS


def test_optimizers_that_step_inside_backward_end_the_step_with_it(
    model: nn.Module, tmp_path: Path
) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)

        def update(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)

    with record(model, tmp_path / "run"):
        for _ in range(STEPS):
            loss_of(model).backward()

    backward = events_of(tmp_path / "run", EventKind.BACKWARD)
    whole = backward.where(backward.unit == -1)
    ends = events_of(tmp_path / "run", EventKind.STEP).end_ns
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3]
    assert list(whole.step) == [0, 1, 2, 3]
    assert (whole.end_ns <= ends).all()


def test_a_closure_counts_as_forward_and_backward_and_not_as_optimizer(
    model: nn.Module, tmp_path: Path
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with record(model, tmp_path / "run"):
        for _ in range(STEPS):
            optimizer.step(closure)

    backward = events_of(tmp_path / "run", EventKind.BACKWARD)
    whole = backward.where(backward.unit == -1)
    own = events_of(tmp_path / "run", EventKind.OPTIMIZER)
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3]
    assert (own.start_ns >= whole.end_ns).all()


def test_a_step_of_an_optimizer_without_a_forward_ends_nothing(
    model: nn.Module, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    with record(model, tmp_path / "run"):
        loss_of(model).backward()
        optimizer.step()
        optimizer.step()

    assert steps_of(tmp_path / "run") == [0]


def test_a_step_that_is_left_after_the_recording_ended_says_nothing(
    model: nn.Module, tmp_path: Path
) -> None:
    recorder = record(model, tmp_path / "run")

    def fail() -> None:
        with recorder.step():
            recorder.detach()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert open_run(tmp_path / "run").status is RunStatus.COMPLETE
