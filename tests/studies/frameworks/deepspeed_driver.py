"""Train with DeepSpeed's ZeRO-1, ZeRO-2 or ZeRO-3 on CPU, with accumulation and clipping.

    torchrun --nproc-per-node 2 deepspeed_driver.py FOLDER STAGE [--callback]

DeepSpeed has no callbacks, so the recorder is attached to the engine. The buckets are small, so
that a step has several reductions and ZeRO-3 prefetches.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from tests.studies.frameworks.losses import LossFile
from tests.studies.frameworks.small_models import llama, token_rows

NUM_STEPS = 9
ACCUMULATION = 2


def config(stage: int) -> dict[str, Any]:
    """Settings of an engine that updates with torch's AdamW."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 80_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 60_000,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }


def train(folder: Path, stage: int, *, with_recorder: bool) -> None:
    """Train a small model for some steps."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))
    losses, recorder = LossFile(folder), None
    if with_recorder:
        from fsdp_inspect import Recorder

        recorder = Recorder(engine, path=folder / "run")
    rows = torch.tensor(token_rows(2 * 2 * NUM_STEPS * ACCUMULATION)).chunk(2)[dist.get_rank()]
    for batch in rows.split(2):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.add(loss.item())
    if recorder is not None:
        recorder.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), with_recorder="--callback" in sys.argv)
    dist.destroy_process_group()
