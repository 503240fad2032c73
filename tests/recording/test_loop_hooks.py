"""Data time counts on the training thread only."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.loop_hooks import LoopHooks
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import EventKind

_KIND = 3


def kinds_recorded(load: Any) -> list[int]:
    rows: list[tuple[int, ...]] = []
    session = Session(HostClock(), rows.append, ProcessGroups())
    patches = Patches()
    LoopHooks(session, None, lambda optimizer: None).attach(patches)
    try:
        load(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    finally:
        patches.undo()
    return [row[_KIND] for row in rows]


def test_loading_on_the_training_thread_is_data_time() -> None:
    assert kinds_recorded(list) == [EventKind.DATA] * 4  # three batches, and the end


def test_loading_ahead_on_another_thread_is_not() -> None:
    def load_elsewhere(loader: Any) -> None:
        thread = threading.Thread(target=list, args=(loader,))
        thread.start()
        thread.join()

    assert kinds_recorded(load_elsewhere) == []


def test_batches_and_passes_are_counted() -> None:
    session = Session(HostClock(), lambda row: None, ProcessGroups())
    patches = Patches()
    LoopHooks(session, None, lambda optimizer: None).attach(patches)
    data = TensorDataset(torch.arange(6.0))
    try:
        first, second = DataLoader(data, batch_size=2), DataLoader(data, batch_size=3)
        list(first), next(iter(second)), list(zip(first, second, strict=False))
    finally:
        patches.undo()
    counts = session.num_batches, session.num_loader_passes, session.last_ended_pass
    assert counts == (3 + 1 + 5, 4, 4)
