"""Shard a model by a parametrization, so that torch.compile captures the communication.

Each parameter becomes a `DTensor` shard. A parametrization gathers it when a module reads it, and
autograd reduces the gradient. torchtitan's SimpleFSDP works in the same way. torch has no class for
it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize


class Gather(nn.Module):
    """Returns the full parameter of a shard; its gradient is averaged over the ranks."""

    def forward(self, shard: DTensor) -> torch.Tensor:
        """The full parameter, as a plain tensor."""
        full: torch.Tensor = shard.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial("avg")]
        )
        return full


def shard_by_parametrization(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replace each parameter by its shard; parameters that modules share stay shared.

    Args:
        model: The model with its weights, which are equal on all ranks.
        mesh: One dimension of ranks.
    """
    shards: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in shards:
                full = parameter.detach()
                shard = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
                shards[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            module.register_parameter(name, shards[id(parameter)])
            parametrize.register_parametrization(module, name, Gather(), unsafe=True)
    return model
