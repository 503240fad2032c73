"""A training whose steps take longer from step 70 on.

    torchrun --nproc-per-node 2 drift_script.py RUN_FOLDER FAULT

FAULT: `data` (both ranks wait longer for data) or `late` (rank 1 works longer).
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder

STEPS = 140
CHANGE = 70
LONGER_S = 0.06


def main(run: Path, fault: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer=optimizer, path=run, memory_steps=()) as recorder:
        for step in range(STEPS):
            has_changed = step >= CHANGE
            with recorder.step():
                with recorder.data():
                    time.sleep(LONGER_S if has_changed and fault == "data" else 0.01)
                if has_changed and fault == "late" and dist.get_rank() == 1:
                    time.sleep(LONGER_S)
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
