"""A snapshot that torch takes on a GPU, after its import."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import MemoryPoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


def test_a_real_snapshot_tells_what_torch_counted(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
    try:
        kept = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        del_later = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del del_later
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "real.pickle"))
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    import_snapshot(tmp_path / "real.pickle", tmp_path / "run")
    run = open_run(tmp_path / "run")
    table = run.memory(0)
    now = table.where(table.point == MemoryPoint.SNAPSHOT)
    assert (now.allocated[0], now.reserved[0]) == (allocated, reserved)
    assert measure_memory(run).peak_allocated_bytes == peak
    assert kept.numel() == 8 * MIB
