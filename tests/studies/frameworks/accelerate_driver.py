"""Train with Accelerate and FSDP2 or FSDP1, on CPU.

    torchrun --nproc-per-node 2 accelerate_driver.py FOLDER [VERSION] [--callback]

Accelerate 1.15 does not support FSDP on CPU. `AcceleratorState` uses an FSDP plugin for
accelerators only: CPU ranks are `MULTI_CPU`, also with `ACCELERATE_USE_FSDP=true`. Therefore
`shard_on_cpu` sets the state that an accelerator would set. `prepare`, the optimizer, the data
loader, `accumulate` and the clipping are Accelerate's own code.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from tests.studies.frameworks.losses import LossFile
from tests.studies.frameworks.small_models import llama, token_rows

NUM_MICROBATCHES = 18


def shard_on_cpu(accelerator: Accelerator, version: int) -> None:
    """Set the state of a process with an accelerator and FSDP."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        sync_module_states=False if version == 1 else None,  # torch requires a device for it
    )
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.device = torch.device("cpu")  # FSDP1 accepts no index of a CPU


def main(folder: Path, version: int, *, with_callback: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    shard_on_cpu(accelerator, version)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    loader: Any = torch.utils.data.DataLoader(torch.tensor(token_rows(72)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = LossFile(folder)
    recorder: Any = nullcontext()
    if with_callback:
        from fsdp_inspect.recording.integrations.accelerate import accelerate_recorder

        recorder = accelerate_recorder(accelerator, model, optimizer, path=folder / "run")
    with recorder:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.add(loss.item())
            if with_callback:
                recorder.log(loss=loss)
    accelerator.end_training()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main(Path(sys.argv[1]), 1 if "1" in sys.argv[2:] else 2, with_callback="--callback" in sys.argv)
    release_process_groups()
