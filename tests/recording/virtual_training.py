"""Record a few steps of real FSDP2 code on a virtual device with the real recorder."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.recording.clocks import CudaClock
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.find import find_sharder
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable

from .virtual_device import MS, TimedGather, TimedModel, TimedScatter, VirtualDevice, fsdp_on

WORLD_SIZE = 4


def shard_blocks_and_root(model: TimedModel) -> None:
    """Make each block a unit; the root owns the head. There is one communication context."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_to_pairs_after_forward(model: TimedModel) -> None:
    """Keep the parameters of each block on pairs of ranks between its forward and backward."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)


def shard_without_root(model: TimedModel) -> None:
    """Make each block and the head a root, so there are as many communication contexts as units."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in (*model.layers, model.head):
        fully_shard(layer, mesh=mesh)


class Replay:
    """A few recorded steps of a virtual schedule: the true times, and the recorded ones."""

    num_steps = 4

    def begin_step(self) -> None:
        """Wait for the device, like a loop that prints its loss."""
        self.device.now_ns = max(self.device.now_ns, self.device.compute.free_ns)

    def finish_step(self, model: nn.Module, session: Session) -> None:
        """Run the work of a training after its backward; here nothing."""

    def __init__(
        self,
        *,
        gather_ms: float,
        scatter_ms: float,
        forward_ms: float = 4,
        host_ms: float = 0.1,
        copy_ms: float = 0,
        shard: Callable[[TimedModel], None] = shard_blocks_and_root,
        prepare: Callable[[Any], object] | None = None,
        plain: Collection[int] = (),
        num_steps: int | None = None,
    ) -> None:
        """`copy_ms` is the time of a copy into an all-gather; `prepare` changes the model."""
        self.device = VirtualDevice()
        self._plain = plain
        self.num_steps = num_steps or self.num_steps
        self._shard = shard
        self._prepare = prepare
        with fsdp_on(self.device, copy_ns=int(copy_ms * MS)):
            self._train(gather_ms, scatter_ms, forward_ms, host_ms)

    def _train(
        self, gather_ms: float, scatter_ms: float, forward_ms: float, host_ms: float
    ) -> None:
        device = self.device
        model = TimedModel(
            device, blocks=4, forward_ns=int(forward_ms * MS), host_ns=int(host_ms * MS)
        )
        self._shard(model)
        if self._prepare is not None:
            self._prepare(model)
        sharder = find_sharder(model)
        self.units = [handle.name for handle in sharder.units]
        for handle in sharder.units:
            module = handle.modules[0]
            module.set_custom_all_gather(TimedGather(device, handle.name, int(gather_ms * MS)))
            module.set_custom_reduce_scatter(
                TimedScatter(device, handle.name, int(scatter_ms * MS))
            )
        rows: list[tuple[int, ...]] = []
        self.clock = CudaClock(device)
        self.box = BlackBoxWriter(self.clock.host_now)
        session = Session(self.clock, rows.append, ProcessGroups(), black_box=self.box)
        self.events_made: list[int] = []
        """The device events that exist at the end of each step."""
        probe = MemoryProbe(session, lambda row: None, None)
        instruments = Instruments(session, sharder, probe, None, lambda optimizer: None)
        instruments.attach()
        inputs = torch.randn(2, 16, requires_grad=True)
        for step in range(self.num_steps):
            if session.detail == (step in self._plain):
                instruments.choose_detail(step not in self._plain)
            self.begin_step()
            device.log.clear()
            model(inputs).sum().backward()
            self.finish_step(model, session)
            model.zero_grad()
            session.end_step()
            instruments.end_step()
            self.events_made.append(device.num_events)
        instruments.detach()
        assert session.journal.settle(60.0) == 0
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
        """The true start and end of work in the last step."""
        return [(start, end) for k, u, start, end in self.device.log if (k, u) == (kind, unit)]
