"""Torch's own memory tracker sees the same peak. Pinned for torch 2.13: its API is private."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect import ForecastTarget, forecast_memory
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.store.reader import open_run

WORLD_SIZE, WIDTH, BATCH = 8, 256, 16


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def make(mesh: DeviceMesh | None = None) -> ForecastTarget:
    model = Layers()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batch = torch.zeros(BATCH, WIDTH)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return ForecastTarget(model=model, step=step, optimizer=optimizer)


def peak_by_torch() -> int:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    try:
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        with FakeTensorMode():
            target = make(mesh)
            target.step()
            tracker = FSDPMemTracker(target.model, target.optimizer)
            with tracker:
                target.step()
            peak = tracker.get_tracker_snapshot("peak")
    finally:
        dist.destroy_process_group()
    (of_device,) = peak.values()
    return int(of_device["Total"])


def test_the_peak_is_that_of_torchs_tracker(tmp_path: Path) -> None:
    path = forecast_memory(make, tmp_path / "ours", world_size=WORLD_SIZE, device_type="cpu")

    ours = measure_memory(open_run(path)).peak_allocated_bytes

    assert ours is not None
    assert abs(ours / peak_by_torch() - 1) < 0.02
