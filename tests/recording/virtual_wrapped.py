"""Record a few steps of a wrapped model on a virtual device with the real recorder."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import nn

from fsdp_inspect.recording.clocks import CudaClock
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.find import find_sharder
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable

from .virtual_device import VirtualDevice

NUM_STEPS = 4


class Recorded:
    """The events of a few recorded steps, and the true times of the last one."""

    def __init__(
        self,
        device: VirtualDevice,
        model: nn.Module,
        *,
        microbatches: int = 1,
        skips_reduction: bool = False,
    ) -> None:
        """With `skips_reduction`, only the last microbatch reduces gradients."""
        self.device = device
        self.sharder = sharder = find_sharder(model)
        rows: list[tuple[int, ...]] = []
        groups = ProcessGroups()
        sharder.register_groups(groups)
        session = Session(CudaClock(device), rows.append, groups)
        probe = MemoryProbe(session, lambda row: None, None)
        instruments = Instruments(session, sharder, probe, None, lambda optimizer: None)
        instruments.attach()
        inputs = torch.randn(2, 16, requires_grad=True)
        for _ in range(NUM_STEPS):
            device.now_ns = max(device.now_ns, device.compute.free_ns)
            device.log.clear()
            for number in range(microbatches):
                is_skipped = skips_reduction and number < microbatches - 1
                with model.no_sync() if is_skipped else contextlib.nullcontext():
                    model(inputs).sum().backward()
            model.zero_grad()
            session.end_step()
            instruments.end_step()
        self.units = [handle.name for handle in sharder.units]
        self.groups = groups
        instruments.detach()
        assert session.journal.settle(60.0) == 0
        assert session.active, session.problems
        self.problems = session.problems
        table = EventTable.from_columns(
            dict(zip(EventTable.DTYPES, np.array(rows, dtype=np.int64).T, strict=True))
        )
        self.events = table.where(table.step == table.step.max())

    def spans(self, kind: EventKind, unit: str | None = None) -> list[tuple[int, int]]:
        """Start and end of the events of a kind, in the order of their ends."""
        mask = self.events.kind == kind
        if unit is not None:
            mask &= self.events.unit == self.units.index(unit)
        chosen = self.events.where(mask)
        pairs = zip(chosen.start_ns.tolist(), chosen.end_ns.tolist(), strict=True)
        return sorted(pairs, key=lambda span: span[1])

    def happened(self, kind: str) -> list[tuple[int, int]]:
        """The true times of the device's work of a kind."""
        return [(start, end) for name, _, start, end in self.device.log if name == kind]
