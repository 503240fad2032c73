"""Compare the recorder's CUDA times with the profiler's: one GPU as rank 0 of 8, in one run.

This test has not yet run on a GPU. Its logic is tested on virtual streams
(`tests/recording/test_cuda_path.py`). The collectives are spin kernels on the stream on which FSDP
runs them, so they take real stream time under the fake process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect import Recorder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, MemoryPoint, Method
from fsdp_inspect.trace.tables import EventTable

pytestmark = pytest.mark.gpu

WORLD_SIZE = 8
WIDTH = 2048
SPIN_CYCLES = 2_000_000
PROFILED_STEPS = (5, 6, 7)
LAST_STEP = 8
SAMPLED_STEP = 3
"""Unit boundaries are sampled in the first four steps, and in every tenth."""


class SpinningGather(DefaultAllGather):
    """An all-gather that keeps its stream busy for a fixed number of cycles."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(SPIN_CYCLES)
        return super().__call__(*args, **kwargs)


class SpinningScatter(DefaultReduceScatter):
    """A reduce-scatter that keeps its stream busy for a fixed number of cycles."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(SPIN_CYCLES)
        return super().__call__(*args, **kwargs)


class Measured:
    """The recorded events of the profiled steps, and the profiler's spin kernels, both in µs."""

    def __init__(self, events: EventTable, spins: list[tuple[float, float]], run: Path) -> None:
        collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
        order = np.argsort(collectives.end_ns)
        self.collectives = collectives.where(order)
        self.recorded = (self.collectives.end_ns - self.collectives.start_ns) / 1000
        self.spins = np.array([duration for _, duration in sorted(spins)])
        self.run = run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    folder = tmp_path_factory.mktemp("gpu") / "run"
    model = _sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(64, WIDTH, device="cuda", requires_grad=True)
    spins: list[tuple[float, float]] = []
    with Recorder(model, optimizer=optimizer, path=folder, print_verdict=False) as recorder:
        profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        for step in range(LAST_STEP + 1):
            if step == PROFILED_STEPS[0]:
                torch.cuda.synchronize()
                profiler.start()
            with recorder.step():
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == PROFILED_STEPS[-1]:
                torch.cuda.synchronize()
                profiler.stop()
        assert recorder.is_recording, recorder.problems
    for event in profiler.events():
        if "spin_kernel" in event.name:
            spins.append((event.time_range.start, event.time_range.elapsed_us()))
    yield Measured(open_run(folder).events(0, steps=PROFILED_STEPS), spins, folder)
    dist.destroy_process_group()


def _sharded_model() -> nn.Module:
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
        layer.set_custom_all_gather(SpinningGather())
        layer.set_custom_reduce_scatter(SpinningScatter())
    fully_shard(model, mesh=mesh)
    return model


def test_every_collective_has_its_kernel(measured: Measured) -> None:
    assert len(measured.recorded) == len(measured.spins) > 0


def test_durations_are_those_of_the_kernels(measured: Measured) -> None:
    recorded, kernels = np.sort(measured.recorded), np.sort(measured.spins)
    errors = np.abs(recorded - kernels) / kernels
    print(f"recorded median {np.median(recorded):.1f} µs, kernels {np.median(kernels):.1f} µs")
    print(f"relative error: median {np.median(errors):.2%}, p90 {np.quantile(errors, 0.9):.2%}")
    assert np.median(errors) < 0.05


def test_times_are_measured_with_events(measured: Measured) -> None:
    run = open_run(measured.run)
    assert run.ranks[0].clock == "cuda_event"
    assert set(measured.collectives.method.tolist()) == {Method.MEASURED}
    assert (measured.collectives.end_ns > measured.collectives.start_ns).all()


def test_collectives_lie_inside_their_steps(measured: Measured) -> None:
    steps = open_run(measured.run).events(0, kinds=[EventKind.STEP])
    for step in PROFILED_STEPS:
        [start], [end] = steps.start_ns[steps.step == step], steps.end_ns[steps.step == step]
        inside = measured.collectives.where(measured.collectives.step == step)
        assert (inside.start_ns >= start).all()
        assert (inside.end_ns <= end).all()


def test_the_allocator_is_sampled_at_the_boundaries(measured: Measured) -> None:
    memory = open_run(measured.run).memory(0)
    timed = memory.where(memory.step == SAMPLED_STEP)
    points = set(timed.point.tolist())
    assert {MemoryPoint.FORWARD_END, MemoryPoint.BACKWARD_END, MemoryPoint.STEP_END} <= points
    assert (timed.reserved >= timed.active).all()
    assert (timed.active >= timed.allocated).all()
    assert (timed.peak_allocated >= timed.allocated).all()
