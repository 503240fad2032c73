"""After an internal error of the recorder on FSDP1 or DDP, only the recording stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_inspect import Recorder
from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.sharders import ddp, fsdp1
from fsdp_inspect.recording.sharders.ddp import BucketHooks
from fsdp_inspect.recording.sharders.fsdp1 import FlatUnitTimer
from fsdp_inspect.store.reader import open_run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP is switching")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flat() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


def train(model: nn.Module, recorder: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        with recorder.step():
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PLACES = [
    (flat, FlatUnitTimer, "before_pre_forward"),
    (flat, FlatUnitTimer, "before_post_forward"),
    (flat, FlatUnitTimer, "before_post_backward"),
    (replicated, BucketHooks, "_begin_backward"),
    (replicated, BucketHooks, "_begin"),
    (replicated, BucketHooks, "_follow"),
]


@pytest.mark.parametrize(
    ("make", "owner", "name"), [pytest.param(*each, id=each[2]) for each in PLACES]
)
def test_a_bug_stops_the_recording_and_not_the_training(
    make: Callable[[], nn.Module],
    owner: type,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    expected = train(make(), Recorder(nn.Linear(1, 1), enabled=False))

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(owner, name, broken)
    torch.manual_seed(0)
    model = make()
    recorder = Recorder(model, path=tmp_path / "run", print_verdict=False, device_interval_s=0)
    with pytest.warns(RuntimeWarning, match="recording stopped.*planted") as caught:
        losses = train(model, recorder)
    recorder.close()
    assert losses == expected
    assert len(caught) == 1
    assert any("planted" in note for note in open_run(tmp_path / "run").notes)


def test_buckets_that_cannot_be_found_cost_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise AttributeError("another torch")

    model = replicated()
    monkeypatch.setattr(ddp, "find_buckets", broken)
    with pytest.warns(RuntimeWarning, match=r"units of DDP are not recorded .*another torch"):
        recorder = Recorder(model, path=tmp_path / "run")
    assert recorder.is_recording
    recorder.close()
    assert not open_run(tmp_path / "run").manifest.units


def test_a_model_of_fsdp1_without_parameters_is_refused(tmp_path: Path) -> None:
    model = FullyShardedDataParallel(nn.ReLU(), device_id=torch.device("cpu"))
    assert fsdp1.Fsdp1.marks(model)
    with pytest.raises(RecordingError, match="none of them manages a parameter"):
        Recorder(model, path=tmp_path / "run")
