"""A training whose steps wait longer for data from step 60 on.

    torchrun --nproc-per-node 2 drift_script.py RUN_FOLDER

Ranks and collectives are real. The clock is virtual (`tests.validation.virtual_time`), so the step
times do not depend on the machine.
"""

import sys
import time
from pathlib import Path

from tests.validation.virtual_time import VirtualClock

clock = VirtualClock()
time.perf_counter_ns = clock.read  # before anything binds the function by name

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from fsdp_inspect import Recorder  # noqa: E402

STEPS = 120
CHANGE = 60
USUAL_NS, LONGER_NS = 10_000_000, 60_000_000


def main(run: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer=optimizer, path=run, memory_steps=()) as recorder:
        for step in range(STEPS):
            with recorder.step():
                with recorder.data():
                    clock.sleep_until(clock.now_ns + (USUAL_NS if step < CHANGE else LONGER_NS))
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
