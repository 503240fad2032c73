"""Train with a stage of DeepSpeed's ZeRO on two gloo ranks, with one planted mistake.

torchrun --nproc-per-node 2 -m fsdp_inspect.record --out FOLDER deepspeed_mistakes.py STAGE-MISTAKE
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.studies.frameworks.deepspeed_driver import config
from tests.studies.frameworks.mistakes_driver import NUM_STEPS, rows
from tests.studies.frameworks.small_models import llama


def train(stage: int, mistake: str) -> None:
    """Train with a loader of the script, as most scripts do."""
    model: Any = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {**config(stage), "train_micro_batch_size_per_gpu": 1}
    given["gradient_accumulation_steps"] = 2 if mistake == "none" else 1
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    data: Any = rows(is_uneven=mistake == "means")
    sampler = None if mistake == "same" else DistributedSampler(data, shuffle=False)
    for number, batch in enumerate(DataLoader(data, batch_size=1, sampler=sampler)):
        if number == 2 * NUM_STEPS:
            break
        engine.backward(engine(**batch).loss)
        engine.step()


if __name__ == "__main__":
    given_stage, _, given_mistake = sys.argv[1].partition("-")
    train(int(given_stage), given_mistake)
    dist.destroy_process_group()
