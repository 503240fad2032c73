"""A memory step keeps every change of the live memory, with the lines that allocate it."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.analysis.memory.instant import measure_memory_instant
from fsdp_inspect.analysis.memory.step import measure_step_memory
from fsdp_inspect.store.reader import open_run


def test_the_instants_of_a_memory_step_name_the_allocating_lines(
    one_rank: None, tmp_path: Path
) -> None:
    model = fully_shard(nn.Linear(64, 64))
    with Recorder(model, path=tmp_path / "run", memory_steps=[1]) as recorder:
        for _ in range(3):
            with recorder.step():
                scratch = torch.ones(256, 1024)  # 1 MiB
                model(torch.ones(8, 64)).sum().backward()
                del scratch
    run = open_run(tmp_path / "run")
    memory = measure_step_memory(run, rank=0, step=1)
    assert memory is not None
    for reading in memory.readings:
        found = measure_memory_instant(run, rank=0, step=1, offset_ns=reading.offset_ns)
        assert found is not None
        assert found.known_offsets_ns == ()
        assert found.bytes == reading.allocated_bytes, reading
    forward = next(one for one in memory.readings if one.point == "forward_start")
    found = measure_memory_instant(run, rank=0, step=1, offset_ns=forward.offset_ns)
    assert found is not None
    (scratch_row,) = [row for row in found.rows if row.bytes == 1 << 20]
    assert "test_live_history.py:" in scratch_row.line
    resting = next(one for one in run.live_moments(0) if one.phase == "resting")
    end = measure_memory_instant(run, rank=0, step=1, offset_ns=1 << 50)
    assert end is not None
    assert end.bytes == resting.bytes
