"""Train a few steps with a DeepSpeed that has changed one name, with or without the recorder.

`changed_deepspeed.py CHANGE RECORD FOLDER RANK WORLD`; see `tests.recording.changed_torch`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from fsdp_inspect.recording.torch_api.deepspeed_zero import EPILOGUE, FETCH, REDUCE
from tests.recording.changed_torch import add_argument, hide
from tests.studies.frameworks.deepspeed_driver import config

STEPS = 4
CHANGES: dict[str, tuple[int, Callable[[Any], object]]] = {
    "zero3 method is renamed": (3, lambda zero: hide(type(zero), REDUCE)),
    "zero3 method has an argument": (3, lambda zero: add_argument(type(zero), EPILOGUE)),
    "zero3 attribute is renamed": (3, lambda zero: hide(type(zero), "parameter_offload")),
    "zero3 coordinator is renamed": (
        3,
        lambda zero: hide(type(zero.parameter_offload.get_param_coordinator()), FETCH),
    ),
    "zero2 method is renamed": (2, lambda zero: hide(type(zero), "average_tensor")),
    "zero1 attribute is renamed": (1, lambda zero: hide(type(zero), "bit16_groups_flat")),
}


def main(change: str, record: str, folder: str, rank: str, world: str) -> None:
    stage, apply = CHANGES[change]
    store = dist.FileStore(f"{folder}-store-{record}", int(world))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = {**config(stage), "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 2}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    apply(engine.optimizer)
    from fsdp_inspect import Recorder

    with Recorder(engine, path=folder, enabled=record == "yes", print_verdict=False) as recorder:
        for step in range(STEPS):
            loss = engine(torch.full((2, 8), (step + int(rank)) / 7)).square().sum()
            engine.backward(loss)
            engine.step()
            recorder.log(loss=loss)
            print(f"loss {loss.item().hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
