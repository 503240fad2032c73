"""Copies between host and device that stop the host, on the meta device as the device."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.host_stops import StopCounter
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.host_work import PAGEABLE_COPY


class DeviceClock(HostClock):
    """A clock whose session runs on a device."""

    immediate = False


def counted(step: Any, clock: Any = None) -> dict[str, tuple[int, str]]:
    """What `step` does while its calls are counted: name, to number and line."""
    session = Session(clock or DeviceClock(), lambda row: None, ProcessGroups())
    stops, patches = StopCounter(session), Patches()
    before = torch.Tensor.to
    stops.attach(patches, wraps=True)
    try:
        step()
    finally:
        patches.undo()
    assert torch.Tensor.to is before
    stops.end_step(counts=True)
    session.stops = stops
    found = stops._total, stops._places
    names = {number: str(place) for number, place in found[1].new}
    return {
        what: (counts[0], names.get(place, "")) for (what, place, *_), counts in found[0].items()
    }


def test_a_copy_from_pageable_memory_has_its_line() -> None:
    batch = torch.ones(4)

    def step() -> None:
        for _ in range(3):
            batch.to("meta")
        batch.to(torch.float64)  # stays on the host

    line = inspect.getsourcelines(step)[1] + 2
    ((what, (count, place)),) = counted(step).items()
    assert (what, count) == (PAGEABLE_COPY, 3)
    assert place.endswith(f"test_host_stops.py:{line}")


def test_on_a_cpu_no_copy_counts() -> None:
    assert counted(lambda: torch.ones(4).to("meta"), HostClock()) == {}


def test_a_source_that_cannot_be_read_ends_the_recording_and_not_the_training() -> None:
    session = Session(DeviceClock(), lambda row: None, ProcessGroups())
    stops = StopCounter(session)
    stops._note_copy(SimpleNamespace(is_cpu=True), torch.ones(1, device="meta"), {}, 1, None)  # type: ignore[arg-type]
    assert not session.active
