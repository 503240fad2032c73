"""Emulated transfers take their time on a GPU. Run by `make gpu`."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.emulation.collectives import SpinningDevice
from fsdp_inspect.emulation.network import parse_specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind

pytestmark = pytest.mark.gpu

WIDTH = 512
STEPS = 6


def test_a_spin_lasts_as_long_as_asked_by_the_timer_of_the_gpu() -> None:
    notes: list[str] = []
    device = SpinningDevice(torch.device("cuda", 0), notes.append)
    assert notes == []
    for duration_ns in (50_000, 1_000_000, 20_000_000):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        device.spin(duration_ns, device.current_stream())
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) * 1e6 == pytest.approx(duration_ns, rel=0.05, abs=20_000)


def test_collectives_last_what_the_link_says_and_hide_behind_compute(tmp_path: Path) -> None:
    specification = parse_specification("world_size=8,bandwidth=1GB/s,latency=50us")
    with emulate(specification):
        dist.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(4)))
        for layer in (*model, model):
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters())
        with Recorder(model, optimizer=optimizer, path=tmp_path / "run") as recorder:
            for _ in range(STEPS):
                with recorder.step():
                    model(torch.ones(4096, WIDTH, device="cuda")).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        dist.destroy_process_group()

    gathers = open_run(tmp_path / "run").events(0, steps=[4], kinds=[EventKind.ALL_GATHER])
    expected_ns = 50_000 + gathers.bytes * 7 / 8
    measured_ns = gathers.end_ns - gathers.start_ns
    alone = gathers.start_ns[1:] >= gathers.end_ns[:-1]

    assert len(gathers) >= 7
    # A transfer that is queued behind another waits for it on its own stream, as with NCCL.
    assert np.median(measured_ns[1:][alone]) == pytest.approx(np.median(expected_ns), rel=0.1)
