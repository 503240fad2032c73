"""What the allocator's counters become: one row for each boundary, in the columns of the store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_inspect.recording.memory import CudaAllocator, MemoryProbe
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from fsdp_inspect.trace.tables import MemoryTable

STATS = {
    "allocated_bytes": {"all": {"current": 10, "peak": 15}},
    "reserved_bytes": {"all": {"current": 40, "peak": 45}},
    "active_bytes": {"all": {"current": 12}},
    "inactive_split_bytes": {"all": {"current": 7}},
    "num_alloc_retries": 3,
    "num_ooms": 1,
}
"""As `torch.cuda.memory_stats_as_nested_dict` gives them, without what is not read."""


def test_counters_land_in_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: STATS)
    rows: list[tuple[int, ...]] = []
    session: Any = SimpleNamespace(
        step=4,
        microbatch=1,
        phase=Phase.BACKWARD,
        tracker=None,
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
