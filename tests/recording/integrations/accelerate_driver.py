"""Train a small model with the real Accelerate on two gloo ranks; run under torchrun.

    torchrun --nproc-per-node 2 accelerate_driver.py OUTPUT_FOLDER

Accelerate 1.15 uses its FSDP plugin on accelerators only (`AcceleratorState.__init__`: CPU ranks
are always `MULTI_CPU`). This script therefore sets the state to FSDP. Everything after that is
Accelerate's own code on CPU: `prepare` with its `fully_shard` calls, the optimizer, the data loader
and `accumulate`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn

from fsdp_inspect import Recorder
from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.integrations.accelerate import accelerate_recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

OPTIONS: dict[str, Any] = {"device_interval_s": 0, "print_verdict": False}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Set the state of FSDP; see the docstring of the module."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def train(accelerator: Accelerator, run: Path | None) -> list[float]:
    """Train ten microbatches in five optimizer steps; returns the losses."""
    accelerator.free_memory()  # frees the previous model, because it clips the last one only
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(40, 16), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if run is None:
        recorder = Recorder(model, enabled=False)
    else:
        recorder = accelerate_recorder(accelerator, model, optimizer, path=run, **OPTIONS)
    losses = []
    with recorder:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            recorder.log(loss=loss)
            losses.append(loss.item())
    return losses


def refuse_plain(accelerator: Accelerator) -> str:
    """The error about a model that Accelerate did not prepare."""
    try:
        accelerate_recorder(accelerator, nn.Linear(4, 4))
    except RecordingError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    refusal = refuse_plain(accelerator)
    replicated = [train(accelerator, None), train(accelerator, folder / "ddp")]
    shard_on_cpu(accelerator)
    result = {
        "replicated": replicated,
        "without": train(accelerator, None),
        "with": train(accelerator, folder / "run"),
        "refusal": refusal,
    }
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    release_process_groups()
