"""Train two models together, each sharded by its own calls."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    actor, critic = build(), build()
    for block in actor:
        fully_shard(block)
    fully_shard(actor)
    options = {"reshard_after_forward": True}
    for block in critic[:2]:
        fully_shard(block, **options)
    fully_shard(critic)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (actor, critic)]
    with Recorder([actor, critic], optimizer=optimizers, path="run", memory_steps=()):
        for _ in range(6):
            x = torch.randn(4, 16)
            critic(actor(x)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main()
    release_process_groups()
