"""FSDP2 under emulation waits like CUDA's compute stream, and the recording shows it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.emulation.network import parse_specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase, Source
from fsdp_inspect.trace.tables import EventTable

# A layer's message is 4 x 64 x 65 = 16 640 B: 2 ms + 15 ms on the link of one node.
SPECIFICATION = "world_size=8,gpus_per_node=4,bandwidth=1MB/s,latency=2ms,inter_bandwidth=2MB/s"
GATHER_NS = 2_000_000 + round(16_640 * 3 / 4 * 1_000)
STEP = 2


class Layers(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StoredRun]:
    """Train three steps of a sharded model and open the recording."""

    def run(shape: Callable[[Layers], None] | None = None, mesh: tuple[int, ...] = (4,)) -> Any:
        folder = tmp_path_factory.mktemp("emulated") / "run"
        with emulate(parse_specification(SPECIFICATION)):
            dist.init_process_group()
            try:
                _train(folder, shape, mesh)
            finally:
                dist.destroy_process_group()
        return open_run(folder)

    return run


def _train(folder: Path, shape: Callable[[Layers], None] | None, mesh: tuple[int, ...]) -> None:
    world = init_device_mesh("cpu", (8 // 4, 4), mesh_dim_names=("replicate", "shard"))
    model = Layers()
    for module in (*model.layers, model):  # the model itself has no parameters
        fully_shard(module, mesh=world if len(mesh) == 2 else world["shard"])
    if shape is not None:
        shape(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"print_verdict": False, "device_interval_s": 0, "memory_steps": ()}
    with Recorder(model, optimizer=optimizer, path=folder, **options) as recorder:
        for _ in range(STEP + 1):
            with recorder.step():
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder.log(loss=1.0)


@pytest.fixture(scope="module")
def plain(train: Callable[..., StoredRun]) -> StoredRun:
    return train()


def events_of(run: StoredRun, kind: EventKind, unit: int | None = None) -> EventTable:
    events = run.events(0, steps=[STEP], kinds=[kind])
    return events if unit is None else events.where(events.unit == unit)


def test_everything_is_marked_emulated(plain: StoredRun):
    assert plain.manifest.source == "emulated"
    assert plain.manifest.emulation["world_size"] == 8
    assert plain.manifest.emulation["intra"] == {
        "bandwidth_bytes_per_s": 1e6,
        "latency_ns": 2_000_000,
    }
    assert set(plain.events(0).source.tolist()) == {Source.EMULATED}


def test_numbers_of_the_script_are_left_out(plain: StoredRun):
    assert len(plain.scalars(0)) == 0
    assert "meaningless" in plain.ranks[0].problems[0]


def test_a_transfer_lasts_what_its_link_says(plain: StoredRun):
    gathers = events_of(plain, EventKind.ALL_GATHER)

    assert (gathers.end_ns - gathers.start_ns).tolist() == [GATHER_NS] * len(gathers)
    assert (gathers.bytes == 16_640).all()


def test_a_gather_is_needed_where_its_unit_starts_and_waited_for_until_its_end(plain: StoredRun):
    first = events_of(plain, EventKind.ALL_GATHER, 0)
    waits = events_of(plain, EventKind.ALL_GATHER_WAIT, 0)
    forward = events_of(plain, EventKind.FORWARD, 0)

    assert first.issue_ns[0] <= first.need_ns[0] == waits.start_ns[0]
    assert waits.end_ns[0] == first.end_ns[0] <= forward.start_ns[0]


def test_a_prefetched_gather_runs_beside_what_computes(plain: StoredRun):
    """Backward gathers layer 1 while layer 2 computes, so its need is later than its issue."""
    gathers = events_of(plain, EventKind.ALL_GATHER, 1)
    backward = gathers.where(gathers.phase == Phase.BACKWARD)
    reduced = events_of(plain, EventKind.REDUCE_SCATTER, 2)

    assert backward.issue_ns[0] < reduced.issue_ns[0] < backward.need_ns[0]


def test_a_reduction_queues_behind_the_gather_of_its_group(plain: StoredRun):
    both = plain.events(0, steps=[STEP], kinds=[EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER])
    in_order = sorted(
        zip(both.issue_ns.tolist(), both.start_ns.tolist(), both.end_ns.tolist(), strict=True)
    )

    assert all(before[2] <= after[1] for before, after in pairwise(in_order))


def test_a_reduce_scatter_is_waited_for_by_the_next_one(plain: StoredRun):
    last, next_to_last = (events_of(plain, EventKind.REDUCE_SCATTER, unit) for unit in (2, 1))
    copy_in = events_of(plain, EventKind.REDUCE_SCATTER_COPY_IN, 1)

    assert last.issue_ns[0] < last.need_ns[0] < next_to_last.issue_ns[0]
    assert last.end_ns[0] <= copy_in.start_ns[0]


def test_the_step_waits_for_the_last_reduction(plain: StoredRun):
    reductions = events_of(plain, EventKind.REDUCE_SCATTER)
    backward = events_of(plain, EventKind.BACKWARD, NO_UNIT)

    assert reductions.end_ns.max() <= backward.end_ns[0]
    assert (reductions.need_ns > 0).all()


def test_more_input_buffers_let_more_reductions_fly(train: Callable[..., StoredRun]):
    def shape(model: Layers) -> None:
        for layer in model.layers:
            layer.set_reduce_scatter_max_input_buffers(3)

    run = train(shape)
    reductions = events_of(run, EventKind.REDUCE_SCATTER)

    assert reductions.need_ns.min() > reductions.issue_ns.max()


def test_explicit_forward_prefetch_issues_early(train: Callable[..., StoredRun]):
    def shape(model: Layers) -> None:
        for layer, after in pairwise(model.layers):
            layer.set_modules_to_forward_prefetch([after])

    run = train(shape)
    gather = events_of(run, EventKind.ALL_GATHER, 1)
    forward = events_of(run, EventKind.FORWARD, 0)

    assert gather.issue_ns[0] < forward.end_ns[0] < gather.need_ns[0]


def test_an_asynchronous_unshard_is_waited_for_through_its_work(train: Callable[..., StoredRun]):
    run = train(lambda model: [layer._set_unshard_async_op(True) for layer in model.layers])
    gathers = run.events(0, kinds=[EventKind.ALL_GATHER])

    assert set((gathers.end_ns - gathers.start_ns).tolist()) == {GATHER_NS}
    assert (gathers.issue_ns <= gathers.need_ns).all()
    assert (gathers.need_ns < gathers.end_ns).any()  # a busy machine delays some waits


def test_replicas_reduce_on_a_link_of_their_own(train: Callable[..., StoredRun]):
    run = train(mesh=(2, 4))
    scattered = events_of(run, EventKind.REDUCE_SCATTER, 2)
    reduced = events_of(run, EventKind.ALL_REDUCE, 2)
    shard_bytes = 16_640 // 4

    assert reduced.start_ns[0] >= scattered.end_ns[0]
    assert reduced.end_ns[0] - reduced.start_ns[0] == 20_000 + shard_bytes * 2 / 2 * 1_000
    assert reduced.group[0] != scattered.group[0]
    assert reduced.need_ns[0] > events_of(run, EventKind.REDUCE_SCATTER, 1).issue_ns[0]


def test_gradients_that_are_not_synchronised_send_nothing(train: Callable[..., StoredRun]):
    run = train(lambda model: [m.set_requires_gradient_sync(False) for m in model.layers])

    assert len(events_of(run, EventKind.REDUCE_SCATTER)) == 0
