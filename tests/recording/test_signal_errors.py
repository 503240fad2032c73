"""An exception of the training's signal handler reaches the training, wherever it comes up."""

from __future__ import annotations

import functools
import itertools
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.signal_errors import raise_if_of_signal


class WorkerKilledError(Exception):
    """Like the error of torch's handler for a killed worker of a `DataLoader`."""


def _raise(number: int, frame: Any) -> None:
    raise WorkerKilledError


class _Handler:
    def __call__(self, number: int, frame: Any) -> None:
        raise WorkerKilledError

    def method(self, number: int, frame: Any) -> None:
        raise WorkerKilledError


@pytest.fixture
def handle() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR2)
    yield functools.partial(signal.signal, signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(_raise, id="function"),
        pytest.param(_Handler(), id="object"),
        pytest.param(_Handler().method, id="method"),
        pytest.param(functools.partial(_raise), id="partial"),
    ],
)
def test_the_error_of_a_handler_is_raised_again(
    handler: Any, handle: Callable[[Any], None]
) -> None:
    handle(handler)
    with pytest.raises(WorkerKilledError) as raised:
        signal.raise_signal(signal.SIGUSR2)
    with pytest.raises(WorkerKilledError):
        raise_if_of_signal(raised.value)


def test_an_error_of_the_code_itself_is_not() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        _ = 1 / 0
    raise_if_of_signal(raised.value)


def _units() -> FSDPModule:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.slow
def test_the_training_sees_the_error_at_every_mark_of_a_step(
    one_rank: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handle: Callable[[Any], None],
) -> None:
    """A signal arrives at each point of a step at which the recorder reads the clock, in turn."""
    handle(_raise)
    left = -1

    def mark() -> int:
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGUSR2)
        return time.perf_counter_ns()

    monkeypatch.setattr(HostClock, "mark", staticmethod(mark))
    warnings.simplefilter("error", RuntimeWarning)
    raised = 0
    for position in itertools.count(1):
        model = _units()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(
            model, path=tmp_path / f"{position}", print_verdict=False, device_interval_s=0
        )
        left = position
        try:
            with recorder.step():
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except WorkerKilledError:
            raised += 1
        is_done, left = left > 0, -1
        recorder.close()
        if is_done:
            break
    assert raised == position - 1 > 20
