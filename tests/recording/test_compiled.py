"""torch.compile makes the same graphs with the recorder as without it, and prints no warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect import Recorder
from fsdp_inspect.store.reader import open_run
from tests.torch_versions import needs_torch

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile reads it
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),
]
STEPS = 6
Loss = Callable[[torch.Tensor], torch.Tensor]


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, backend="eager")


def in_ddp(model: nn.Module) -> tuple[nn.Module, Loss]:
    wrapped = DistributedDataParallel(model)
    return wrapped, lambda x: compiled(wrapped)(x).mean()


def in_fsdp1(model: nn.Module) -> tuple[nn.Module, Loss]:
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
    return wrapped, lambda x: compiled(wrapped)(x).mean()


def in_place(model: nn.Module) -> tuple[nn.Module, Loss]:
    fully_shard(model).compile(backend="eager")
    return model, lambda x: model(x).mean()


def in_a_function(model: nn.Module) -> tuple[nn.Module, Loss]:
    fully_shard(model)
    called = compiled(lambda x: 2 * model(x))
    return model, lambda x: called(x).mean()


def beside_a_collective(model: nn.Module) -> tuple[nn.Module, Loss]:
    fully_shard(model)

    @compiled
    def reduce(loss: torch.Tensor) -> torch.Tensor:
        total = loss.detach() * 1.0
        dist.all_reduce(total)
        return total / 2

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        reduce(loss)
        return loss

    return model, loss_of


def count(make: Callable[[nn.Module], tuple[nn.Module, Loss]], folder: Path | None) -> list[int]:
    """The graphs and the breaks between graphs, with a recorder if there is a folder for it."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    model, loss_of = make(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = None if folder is None else Recorder(model, path=folder, print_verdict=False)
    for _ in range(STEPS):
        loss_of(torch.ones(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if recorder is not None:
        recorder.close()
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


@pytest.mark.parametrize("make", [in_ddp, in_fsdp1, in_place, in_a_function, beside_a_collective])
def test_the_recorder_adds_no_graph(
    make: Callable[[nn.Module], tuple[nn.Module, Loss]], tmp_path: Path
) -> None:
    if make is not in_ddp and make is not in_place:
        needs_torch("2.11", "compiles one graph more with the recorder")
    graphs, breaks = count(make, None)
    recorded_graphs, recorded_breaks = count(make, tmp_path / "run")

    assert recorded_graphs == graphs
    assert recorded_breaks <= breaks
    run = open_run(tmp_path / "run")
    assert run.ranks[0].num_steps == STEPS
    assert not [note for note in run.notes if "not checked" in note]


def test_a_closed_recorder_leaves_no_traced_form(tmp_path: Path) -> None:
    from torch.distributed._functional_collectives import traceable_collective_remaps as traced

    before = dict(traced)
    with Recorder(fully_shard(nn.Linear(2, 2)), path=tmp_path / "run", print_verdict=False):
        assert dist.all_reduce in traced
        assert len(traced) > len(before)
    assert traced == before
