"""Train with evaluations, checkpoints, a failure and a restart; run once for each attempt.

    torchrun --nproc-per-node 2 lifetime_script.py RUN_FOLDER STEPS [resume]

It compiles a function in step 1, does nothing for some time in step 3, evaluates after step 2 and
saves after step 4. Steps 5 and later are lost. A resumed attempt saves in the background instead,
and does not fail.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder

SLEEP_S = 0.1
STANDSTILL_S = 2.0


def main(run: Path, steps: int, *, resumes: bool) -> None:
    dist.init_process_group("gloo")
    time.sleep(SLEEP_S)  # building the model
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    checkpoint = run.with_name("checkpoint")
    if resumes:
        dcp.load(get_model_state_dict(model), checkpoint_id=checkpoint)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"memory_steps": (), "hang_after_s": 0.5}
    with Recorder(model, optimizer=optimizer, path=run, resume=resumes, **settings) as recorder:
        for step in range(steps):
            with recorder.step():
                if step == 1:
                    torch.compile(torch.sin, backend="eager")(torch.ones(2))
                if step == 3:
                    time.sleep(STANDSTILL_S)
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 2:
                with torch.no_grad():
                    model(torch.randn(4, 32))
                    time.sleep(SLEEP_S)
                    model(torch.randn(4, 32))
            if step == 4 and resumes:
                state = get_model_state_dict(model)
                dcp.async_save(state, checkpoint_id=run.with_name("background")).result()
            elif step == 4:
                dcp.save(get_model_state_dict(model), checkpoint_id=checkpoint)
        if not resumes:
            raise RuntimeError("the node is lost")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), resumes="resume" in sys.argv)
