"""Train in float8 with torchao and float8 all-gathers, on CPU.

    torchrun --nproc-per-node 2 float8_driver.py FOLDER [--callback]

The matrix products are emulated, which is torchao's own setting for devices without float8. The
weights are gathered in float8 as on a GPU. The hand-written loop has no callback, so the recorder
is attached directly.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

from tests.studies.frameworks.losses import LossFile
from tests.studies.frameworks.small_models import llama, token_rows

NUM_STEPS = 9


def main(folder: Path, *, with_callback: bool) -> None:
    dist.init_process_group("gloo")
    model = llama()
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True),
        module_filter_fn=lambda module, fqn: "layers" in fqn,
    )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses, recorder = LossFile(folder), None
    if with_callback:
        from fsdp_inspect import Recorder

        recorder = Recorder(model, optimizer=optimizer, path=folder / "run")
    rows = torch.tensor(token_rows(2 * 2 * NUM_STEPS)).chunk(2)[dist.get_rank()]
    for batch in rows.split(2):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        losses.add(loss.item())
    if recorder is not None:
        recorder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main(Path(sys.argv[1]), with_callback="--callback" in sys.argv)
    release_process_groups()
