"""Count the tensors of a rank that a forecast expects on the host."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import nn

from fsdp_inspect.recording.sharders.fsdp2 import Fsdp2
from fsdp_inspect.recording.tensors import local_part
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.trace.run import HostMemory


def count_host_memory(
    model: nn.Module, sharder: Fsdp2, optimizer: torch.optim.Optimizer | None
) -> HostMemory:
    """Count a rank's offloaded tensors after a step, and the model before it was sharded.

    Args:
        model: The sharded model.
        sharder: Its units.
        optimizer: After its first step; None: its state is not counted.
    """
    groups = [each.group for each in sharder.units if fsdp2.offloads_to_cpu(each.group)]
    whole = chain(model.parameters(), model.buffers())
    return HostMemory(
        offloaded_bytes=sum(
            numel * param.element_size()
            + (_num_bytes([local_part(param)]) if param.requires_grad else 0)
            + (0 if optimizer is None else _num_bytes(_states(optimizer, param)))
            for group in groups
            for param, numel in zip(
                fsdp2.sharded_parameters_of(group),
                fsdp2.padded_shard_numels(group),
                strict=True,
            )
        ),
        whole_model_bytes=_num_bytes(whole),  # a DTensor has the size of the whole parameter
    )


def _states(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Iterable[torch.Tensor]:
    values = optimizer.state.get(param, {}).values()
    return (local_part(value) for value in values if isinstance(value, torch.Tensor))


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
