"""Train with hand-written `fully_shard` calls, which a diff changes.

torchrun --nproc-per-node 2 -m fsdp_inspect.record sharded_script.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithLoss(nn.Module):
    """The recorded module. The names of its units begin with `decoder`."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.decoder(tokens).flatten(0, 1), tokens.flatten())


def shard(decoder: Decoder) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in decoder.layers:
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=True,
        )
    fully_shard(decoder.head, mesh=mesh)
    fully_shard(decoder, mesh=mesh)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    decoder = Decoder()
    shard(decoder)
    model = WithLoss(decoder)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        model(torch.randint(0, 64, (4, 8))).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main()
    release_process_groups()
