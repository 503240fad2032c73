"""Numbers that the training loop logs: tensors, DTensors, values that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.recording.clocks import CudaClock, HostClock
from fsdp_inspect.recording.scalars import ScalarLog, _local_value
from tests.torch_versions import needs_torch

from .virtual_device import MS, VirtualDevice


@pytest.fixture(scope="module", autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Logged:
    """A log with a clock, and its rows."""

    def __init__(self, clock: Any) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.problems: list[str] = []
        self.log = ScalarLog(clock, self.rows.append, self.problems.append)

    def copy_later(self, step: int, name: str, value: torch.Tensor) -> None:
        """Copy a value as if it were on a device."""
        self.log._late._copy(value, self.log._keeper(step, self.log._code(name), 0))

    def pend(self, *copies: tuple[int, float, Any]) -> None:
        """Pretend that copies of losses, with steps and marks, are on their way."""
        code = self.log._code("loss")
        self.log._late._pending.extend(
            (torch.tensor(value), self.log._keeper(step, code, 0), mark)
            for step, value, mark in copies
        )

    def values(self) -> dict[str, float]:
        return {self.log.names[int(code)]: value for _, code, _, value in self.rows}


def test_the_norm_of_clipped_gradients_is_logged() -> None:
    needs_torch("2.13", "leaves what the fake process group gathers uninitialised")
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(1, 4)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    logged = Logged(HostClock())
    logged.log.log(0, {"grad_norm": norm})
    assert logged.values() == {"grad_norm": pytest.approx(float(norm.to_local()))}
    assert not logged.problems


def test_a_dtensor_on_a_device_is_copied_as_a_plain_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_torch("2.11", "copies from a DTensor into a plain tensor")
    # This imitates a CUDA device: `copy_` from a DTensor into a plain tensor raises in torch 2.13.
    mesh = init_device_mesh("cpu", (2,))
    value = DTensor.from_local(torch.tensor(3.0), mesh, [Replicate()], run_check=False)
    with pytest.raises(AssertionError):
        torch.empty(()).copy_(value)
    device = VirtualDevice()
    logged = Logged(CudaClock(device))
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    )
    logged.copy_later(0, "norm", _local_value(value))
    device.spend(MS)
    logged.log.drain()
    assert logged.values() == {"norm": 3.0}


@pytest.mark.parametrize("placement", [Shard(0), Partial()], ids=["sharded", "partial"])
def test_an_incomplete_dtensor_is_skipped_without_a_collective(placement: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    value = DTensor.from_local(torch.ones(1), mesh, [placement], run_check=False)
    logged = Logged(HostClock())
    logged.log.log(0, {"loss": 1.5, "norm": value, "rate": 0.1})
    assert logged.values() == {"loss": 1.5, "rate": 0.1}
    [problem] = logged.problems
    assert "'norm'" in problem
    assert "full_tensor()" in problem


def test_a_value_of_several_elements_is_skipped_and_named() -> None:
    logged = Logged(HostClock())
    logged.log.log(0, {"losses": torch.ones(3), "loss": torch.tensor(2.0)})
    assert logged.values() == {"loss": 2.0}
    assert logged.problems == [
        "The logged value 'losses' cannot be read and is skipped: it has the shape (3,). "
        "Expected a number or a tensor with one element."
    ]


def test_the_event_behind_a_copy_goes_back_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    logged = Logged(clock)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    )
    for step in range(5):
        logged.copy_later(step, "loss", torch.tensor(float(step)))
        device.spend(MS)
        logged.log.drain()
    assert len(clock._pool) == 1
    assert [row[3] for row in logged.rows] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_value_that_is_not_computed_at_the_end_is_noted_as_missing() -> None:
    device = VirtualDevice()
    logged = Logged(CudaClock(device))
    ready, late = logged.log._clock.mark(), None
    device.run("forward", "x", 20 * MS)
    late = logged.log._clock.mark()
    logged.pend((3, 2.0, ready), (4, 1.0, late))
    logged.log.close(0.01)
    assert [row[0] for row in logged.rows] == [3]
    [problem] = logged.problems
    assert problem.startswith("1 logged values of the last steps are missing")


def test_a_value_logged_after_the_last_step_is_awaited() -> None:
    device = VirtualDevice()
    logged = Logged(CudaClock(device))
    device.run("forward", "x", 20 * MS)
    mark = logged.log._clock.mark()
    logged.pend((4, 1.0, mark))
    logged.log.close(1.0)
    assert logged.values() == {"loss": 1.0}
    assert not logged.problems
