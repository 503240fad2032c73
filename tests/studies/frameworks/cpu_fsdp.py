"""The Trainer of Transformers with its option `fsdp` on CPU.

Accelerate has no supported way to FSDP on CPU: `AcceleratorState` takes up an FSDP plugin for
accelerators only, and CPU ranks are `MULTI_CPU`. So `CpuFsdpTrainer` sets the state that a process
with an accelerator has. Parsing the option, building the plugin, `prepare`, the wrapping, the loop
and the clipping are code of Transformers and Accelerate.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer


class CpuFsdpTrainer(Trainer):
    """A Trainer whose option `fsdp` has its effect on CPU too."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and set the state of a process with a device."""
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.device = torch.device("cpu")  # FSDP1 accepts no index of a CPU
        self.is_fsdp_enabled = True
