"""Train with a stage of DeepSpeed's ZeRO on two gloo ranks, with a planted fault of the gradients.

    zero_equivalence.py STAGE FAULT

The faults are none, alone (the group of data parallelism has one rank), own (the reductions of
ZeRO-1 and ZeRO-2 do nothing) and twice (the script divides the loss by the number of ranks).
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from tests.studies.frameworks.deepspeed_driver import ACCUMULATION, config
from tests.studies.frameworks.small_models import llama


class OwnGroups:
    """The groups of a script that takes all ranks for tensor parallelism."""

    def __init__(self) -> None:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self._own = groups[dist.get_rank()]

    def get_data_parallel_group(self) -> Any:
        return self._own

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


def train(stage: int, fault: str) -> None:
    """Train for three steps."""
    deepspeed.init_distributed("gloo")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"mpu": OwnGroups()} if fault == "alone" else {}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(stage), **options
    )
    if fault == "own":
        deepspeed.comm.all_reduce = lambda tensor, *args, **kwargs: None
    torch.manual_seed(dist.get_rank())
    for _ in range(3 * ACCUMULATION):
        rows = torch.randint(0, 256, (2, 32))
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss / dist.get_world_size() if fault == "twice" else loss)
        engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2])
