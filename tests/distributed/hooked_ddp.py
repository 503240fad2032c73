"""Train many small buckets with a communication hook, under a recorder, on gloo ranks.

    torchrun --nproc-per-node 3 hooked_ddp.py OUTPUT_FOLDER

The hook's messages are Python tensors that gloo's threads free. See [Note: Where the observer
attaches to the dispatcher].
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect import Recorder

STEPS = 100


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    layers = [nn.Linear(32, 32) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.004)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer=optimizer, path=folder, print_verdict=False) as recorder:
        for _ in range(STEPS):
            with recorder.step():
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
