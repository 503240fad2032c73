from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard

from tests.torch_versions import placement_result_or_skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(8)
        self.attention = nn.Linear(8, 8, bias=False)
        self.ffn_norm = nn.LayerNorm(8)
        self.ffn = nn.Linear(8, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.ffn(self.ffn_norm(hidden))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.zeros(1, 3, dtype=torch.long)


@pytest.fixture
def fake_world_of_4() -> Iterator[None]:
    """One process that acts as rank 0 of 4; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_meshes_in_one_unit(fake_world_of_4: None) -> nn.Module:
    """A root unit with two groups: the last layer, like an expert, shards over 2 of 4 ranks."""
    placement_result = placement_result_or_skip()
    experts = FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], 0)
    dense = FSDPMeshInfo(init_device_mesh("cpu", (4,)), 0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    expert = model[1].weight

    def place(parameter: nn.Parameter) -> Any:
        return placement_result(Shard(0), experts if parameter is expert else dense)

    fully_shard(model, mesh=dense.mesh, shard_placement_fn=place)
    return model
