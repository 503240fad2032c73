"""The CUDA path without a GPU: a known schedule on virtual streams, read back by the recorder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.recording.clocks import CudaClock
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.units import ProcessGroups, find_recordable_groups
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.reduction import StepPart, reduce_rank
from fsdp_inspect.trace.tables import EventTable

from .virtual_device import (
    MS,
    TimedGather,
    TimedModel,
    TimedScatter,
    VirtualDevice,
    fsdp_on,
)

WORLD_SIZE = 4
COMPUTE = ("forward", "backward")


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


class Replay:
    """A few recorded steps of a virtual schedule: what ran, and what the recorder wrote."""

    num_steps = 4

    def begin_step(self) -> None:
        """The host waits for the device, as a loop that prints its loss does."""
        self.device.now_ns = max(self.device.now_ns, self.device.compute.free_ns)

    def finish_step(self, model: Any, session: Session) -> None:
        """What a training does behind its backward; here nothing."""

    def __init__(
        self,
        *,
        gather_ms: float,
        scatter_ms: float,
        forward_ms: float = 4,
        host_ms: float = 0.1,
        prepare: Callable[[Any], object] | None = None,
    ) -> None:
        """`prepare` changes the sharded model before it trains."""
        self.device = VirtualDevice()
        self._prepare = prepare
        with fsdp_on(self.device):
            self._train(gather_ms, scatter_ms, forward_ms, host_ms)

    def _train(
        self, gather_ms: float, scatter_ms: float, forward_ms: float, host_ms: float
    ) -> None:
        device = self.device
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        model = TimedModel(
            device, blocks=4, forward_ns=int(forward_ms * MS), host_ns=int(host_ms * MS)
        )
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if self._prepare is not None:
            self._prepare(model)
        handles = find_recordable_groups(model)
        self.units = [handle.name for handle in handles]
        for handle in handles:
            module = handle.modules[0]
            module.set_custom_all_gather(TimedGather(device, handle.name, int(gather_ms * MS)))
            module.set_custom_reduce_scatter(
                TimedScatter(device, handle.name, int(scatter_ms * MS))
            )
        rows: list[tuple[int, ...]] = []
        session = Session(CudaClock(device), rows.append, ProcessGroups())
        probe = MemoryProbe(session, lambda row: None, None)
        instruments = Instruments(session, handles, probe, None, lambda optimizer: None)
        instruments.attach()
        inputs = torch.randn(2, 16, requires_grad=True)
        for _ in range(self.num_steps):
            self.begin_step()
            device.log.clear()
            model(inputs).sum().backward()
            self.finish_step(model, session)
            model.zero_grad()
            session.end_step()
            instruments.end_step()
        instruments.detach()
        assert session.journal.settle() == 0
        assert session.active, session.problems
        self.events = EventTable.from_columns(
            dict(zip(EventTable.DTYPES, np.array(rows, dtype=np.int64).T, strict=True))
        )

    def recorded(self, kind: EventKind, unit: str) -> list[tuple[int, int]]:
        """Start and end of a unit's events of a kind in the last step, in order."""
        events = self.events
        mask = (events.kind == kind) & (events.unit == self.units.index(unit))
        mask &= events.step == events.step.max()
        chosen = events.where(mask)
        order = np.argsort(chosen.start_ns)
        return list(
            zip(chosen.start_ns[order].tolist(), chosen.end_ns[order].tolist(), strict=True)
        )

    def happened(self, kind: str, unit: str) -> list[tuple[int, int]]:
        """What really ran in the last step."""
        return [(start, end) for k, u, start, end in self.device.log if (k, u) == (kind, unit)]


@pytest.fixture(scope="module")
def bandwidth_bound() -> Replay:
    return Replay(gather_ms=6, scatter_ms=6)


@pytest.fixture(scope="module")
def well_hidden() -> Replay:
    return Replay(gather_ms=1, scatter_ms=1)


def test_collective_ends_are_those_of_the_device(bandwidth_bound: Replay) -> None:
    for unit in bandwidth_bound.units:
        for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER):
            recorded = [end for _, end in bandwidth_bound.recorded(kind, unit)]
            happened = [end for _, end in bandwidth_bound.happened(kind.label, unit)]
            assert recorded
            assert recorded == pytest.approx(happened, abs=200), (kind, unit)


def test_a_collective_starts_no_later_than_it_ran_and_after_its_predecessor_on_the_stream(
    bandwidth_bound: Replay,
) -> None:
    for unit in bandwidth_bound.units:
        recorded = bandwidth_bound.recorded(EventKind.REDUCE_SCATTER, unit)
        happened = bandwidth_bound.happened("reduce_scatter", unit)
        for (start, _), (true_start, _) in zip(recorded, happened, strict=True):
            assert start <= true_start + 200


def test_forward_spans_hold_the_compute_of_their_unit(well_hidden: Replay) -> None:
    for unit in well_hidden.units[1:]:
        [(start, end)] = well_hidden.recorded(EventKind.FORWARD, unit)
        [(true_start, true_end)] = well_hidden.happened("forward", unit)
        assert start <= true_start + 200
        assert end == pytest.approx(true_end, abs=200)


def test_backward_spans_hold_the_compute_of_their_unit(bandwidth_bound: Replay) -> None:
    for unit in bandwidth_bound.units[1:]:
        [(start, end)] = bandwidth_bound.recorded(EventKind.BACKWARD, unit)
        [(true_start, true_end)] = bandwidth_bound.happened("backward", unit)
        assert start <= true_start + 200
        assert end >= true_end - 200


def _idle_ns(replay: Replay) -> int:
    """How long the compute stream stood still between the last step's first and last work."""
    work = [(start, end) for kind, _, start, end in replay.device.log if kind in COMPUTE]
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(sorted(work))]
    return sum(gap for gap in gaps if gap > 0)


def test_exposed_time_is_the_time_the_compute_stream_stood_still(bandwidth_bound: Replay) -> None:
    summary = reduce_rank(bandwidth_bound.events, rank=0)
    last = summary.where(summary.step == summary.step.max())
    steps = last.where(last.kind == EventKind.STEP)
    first_gather = bandwidth_bound.happened("all_gather", "")[0]
    last_scatter = max(
        end for kind, _, _, end in bandwidth_bound.device.log if kind == "reduce_scatter"
    )
    last_compute = max(end for kind, _, _, end in bandwidth_bound.device.log if kind == "backward")
    head = bandwidth_bound.happened("forward", "layers.0")[0][0] - first_gather[0]
    expected = _idle_ns(bandwidth_bound) + head + (last_scatter - last_compute)
    assert steps.exposed_ns[0] == pytest.approx(expected, rel=0.02)


def test_the_parts_of_each_step_add_up(bandwidth_bound: Replay) -> None:
    summary = reduce_rank(bandwidth_bound.events, rank=0)
    for step in np.unique(summary.step):
        rows = summary.where(summary.step == step)
        parts = rows.where((rows.kind >= 100) & (rows.kind < StepPart.COMMUNICATION))
        whole = rows.where(rows.kind == EventKind.STEP)
        assert parts.duration_ns.sum() == whole.duration_ns[0]


def test_little_is_exposed_when_compute_is_long(well_hidden: Replay) -> None:
    summary = reduce_rank(well_hidden.events, rank=0)
    last = summary.where((summary.step == summary.step.max()) & (summary.kind == EventKind.STEP))
    floor_ns = 4 * MS  # the first two gathers of the forward, the last two reductions
    assert last.exposed_ns[0] == pytest.approx(floor_ns, abs=0.2 * MS)


def test_the_wait_for_a_reduction_belongs_to_the_unit_that_is_reduced() -> None:
    replay = Replay(gather_ms=1, scatter_ms=12)
    events = replay.events
    waits = events.where(events.kind == EventKind.REDUCE_SCATTER_WAIT)
    elsewhere = waits.where((waits.unit != waits.issued_by) & (waits.end_ns > waits.start_ns))
    names = {
        (replay.units[unit], replay.units[place])
        for unit, place in zip(elsewhere.unit, elsewhere.issued_by, strict=True)
        if place >= 0
    }
    assert {("layers.3", "layers.2"), ("layers.2", "layers.1")} <= names


def test_host_bound_waits_are_not_called_exposed() -> None:
    replay = Replay(gather_ms=1, scatter_ms=1, forward_ms=0.5, host_ms=5)
    summary = reduce_rank(replay.events, rank=0)
    last = summary.where(summary.step == summary.step.max())
    step = last.where(last.kind == EventKind.STEP)
    assert step.exposed_ns[0] < 0.4 * step.duration_ns[0]


def test_the_clock_finds_the_offset_of_the_device() -> None:
    device = VirtualDevice(clock_offset_ns=123_456_789_000)
    clock = CudaClock(device)
    device.spend(3 * MS)
    device.run("forward", "x", 5 * MS)
    mark = clock.mark()
    assert not clock.ready(mark)
    device.spend(6 * MS)
    assert clock.ready(mark)
    assert clock.read(mark) == pytest.approx(8 * MS, abs=100)


def test_the_clock_follows_anchors_over_a_long_run() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    for _ in range(200):
        device.spend(1000 * MS)
        clock.advance()
    device.run("forward", "x", 2 * MS)
    mark = clock.mark()
    device.spend(3 * MS)
    assert clock.read(mark) == pytest.approx(200_002 * MS, abs=1000)


def test_events_go_back_to_the_pool() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    for _ in range(10):
        marks = [clock.mark() for _ in range(5)]
        device.spend(MS)
        for mark in marks:
            clock.read(mark)
    assert len(clock._pool) == 5
