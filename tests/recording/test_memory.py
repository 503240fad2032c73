"""The allocator's counters become one row for each boundary, in the columns of the store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_inspect import Recorder, open_run
from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.memory import AllocatorReading, CudaAllocator, MemoryProbe
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import EventFlag, EventKind, MemoryPoint, Phase
from fsdp_inspect.trace.tables import EventTable, MemoryTable

STATS = {
    "allocated_bytes": {"all": {"current": 10, "peak": 15}},
    "reserved_bytes": {"all": {"current": 40, "peak": 45}},
    "active_bytes": {"all": {"current": 12}},
    "inactive_split_bytes": {"all": {"current": 7}},
    "num_alloc_retries": 3,
    "num_ooms": 1,
}
"""The form of `torch.cuda.memory_stats_as_nested_dict`, without values that are not read."""


def test_counters_land_in_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: STATS)
    rows: list[tuple[int, ...]] = []
    session: Any = SimpleNamespace(
        step=4,
        microbatch=1,
        phase=Phase.BACKWARD,
        tracker=None,
        watch_memory=lambda: None,
        clock=SimpleNamespace(host_now=lambda: 99),
    )
    probe = MemoryProbe(session, rows.append, CudaAllocator(torch.device("cuda", 0)))
    probe.sample(MemoryPoint.BACKWARD_END, unit=2)
    [row] = rows
    named = dict(zip(MemoryTable.DTYPES, row, strict=True))
    assert (named["step"], named["unit"], named["time_ns"]) == (4, 2, 99)
    assert (named["allocated"], named["peak_allocated"]) == (10, 15)
    assert (named["reserved"], named["peak_reserved"], named["active"]) == (40, 45, 12)
    assert (named["inactive_split"], named["num_alloc_retries"], named["num_ooms"]) == (7, 3, 1)
    assert named["activation"] == -1


class Counters:
    """An allocator whose peak the test sets."""

    def __init__(self) -> None:
        self.peak = 100
        self.num_reads = self.num_driver_calls = 0

    def read(self) -> AllocatorReading:
        self.num_reads += 1
        return (50, 80, 60, self.peak, 90, 0, 0, 0, self.num_driver_calls)


def sampled_steps(counters: Counters, peaks: dict[int, int], count: int) -> list[int]:
    """The steps whose unit boundaries are sampled, for peaks that rise as given."""
    session = Session(HostClock(), lambda row: None, ProcessGroups())
    probe = MemoryProbe(session, lambda row: None, counters)
    detailed = []
    for step in range(count):
        session.step = step
        if step:
            probe.begin_step()
        if session.watches_memory:
            detailed.append(step)
        counters.peak = peaks.get(step, counters.peak)
        probe.sample(MemoryPoint.STEP_END)
    return detailed


def test_boundaries_are_sampled_at_first_and_then_every_tenth_step() -> None:
    assert sampled_steps(Counters(), {}, 35) == [0, 1, 2, 3, 10, 20, 30]


def test_boundaries_are_sampled_in_the_step_after_one_that_raised_the_peak() -> None:
    assert sampled_steps(Counters(), {14: 200, 15: 300, 22: 250}, 30) == [
        *(0, 1, 2, 3, 10, 15, 16, 20)
    ]


def test_the_driver_s_allocations_are_marked_in_the_step_that_made_them() -> None:
    rows: list[tuple[int, ...]] = []
    session, counters = Session(HostClock(), rows.append, ProcessGroups()), Counters()
    probe = MemoryProbe(session, lambda row: None, counters)
    for step, count in {0: 5, 1: 5, 2: 6, 3: 6, 9: 8}.items():  # 4 to 8 have no reading
        session.step, counters.num_driver_calls = step, count
        probe.sample(MemoryPoint.STEP_END)
    [row] = rows
    event = dict(zip(EventTable.DTYPES, row, strict=True))
    assert (event["step"], event["kind"]) == (2, EventKind.DEVICE_ALLOCATION)
    assert event["flags"] == EventFlag.LATEST_END
    assert event["start_ns"] == event["end_ns"]


class UncountedAllocator:
    """A pluggable allocator, for which torch raises when its statistics are read."""

    def read(self) -> AllocatorReading:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")


def test_an_allocator_without_statistics_ends_the_sampling_only() -> None:
    rows: list[tuple[int, ...]] = []
    session = Session(HostClock(), lambda row: None, ProcessGroups())
    probe = MemoryProbe(session, rows.append, UncountedAllocator())
    for _ in range(3):
        probe.sample(MemoryPoint.STEP_END)
    assert session.active
    assert not session.watches_memory
    assert not rows
    [problem] = session.problems
    assert problem.startswith("Memory is not sampled: the allocator of this device has no")
    assert "getDeviceStats" in problem


def test_frozen_parameters_of_ddp_are_parameters(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        base, head = nn.Linear(64, 64, bias=False), nn.Linear(64, 2, bias=False)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(base.requires_grad_(False), head))
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        with Recorder(model, path=tmp_path / "run", memory_steps=[1], print_verdict=False):
            for _ in range(3):
                model(torch.randn(2, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    peak = open_run(tmp_path / "run").summary().memory.peak
    sizes = {row.category: row.bytes for row in peak.categories}
    assert sizes["sharded_parameter"] == 4 * (64 * 64 + 64 * 2)


def test_inputs_are_those_of_forwards_with_gradients() -> None:
    session = Session(HostClock(), lambda row: None, ProcessGroups())
    tracker: Any = SimpleNamespace(classify=lambda tensors, category, unit: named.extend(tensors))
    session.tracker, named = tracker, list[torch.Tensor]()
    probe = MemoryProbe(session, lambda row: None, Counters())
    evaluated, trained = torch.ones(4, 8), torch.ones(32, 8)
    for step in range(2):
        session.step = step
        with torch.no_grad():
            probe.inputs((evaluated,), {})
        probe.inputs((trained,), {})
        probe.inputs((evaluated,), {})
        assert session.inputs == "32 x 8 float32"
    assert [each.shape[0] for each in named] == [4, 32, 4, 32]
