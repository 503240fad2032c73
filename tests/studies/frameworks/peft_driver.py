"""Train LoRA with peft on a frozen model, sharded by hand, on CPU.

    torchrun --nproc-per-node 2 peft_driver.py FOLDER [--callback]

peft has no training loop. The loop around it has the callback, which is the recorder here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

from tests.studies.frameworks.losses import LossFile
from tests.studies.frameworks.small_models import llama, token_rows

NUM_STEPS = 9


def train(model: Any, folder: Path, *, with_recorder: bool) -> None:
    """Shard the model's layers and train it for some steps."""
    for layer in model.get_submodule("base_model.model.model.layers"):
        fully_shard(layer)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses, recorder = LossFile(folder), None
    if with_recorder:
        from fsdp_inspect import Recorder

        recorder = Recorder(model, optimizer=optimizer, path=folder / "run")
    rows = torch.tensor(token_rows(2 * 2 * NUM_STEPS)).chunk(2)[dist.get_rank()]
    for batch in rows.split(2):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.add(loss.item())
    if recorder is not None:
        recorder.close()


def main(folder: Path, *, with_callback: bool) -> None:
    dist.init_process_group("gloo")
    base = llama()
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    train(get_peft_model(base, config), folder, with_recorder=with_callback)
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main(Path(sys.argv[1]), with_callback="--callback" in sys.argv)
    release_process_groups()
