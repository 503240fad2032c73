"""Record a training on two real ranks over the existing network.

    limited_driver.py RUN_FOLDER [--prefetch]

It prints the shortest time of a plain all-gather of 4 MB on each rank.
"""

import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

STEPS = 4
NUM_BYTES = 4_000_000


def main() -> None:
    dist.init_process_group("gloo")
    print(f"ALL_GATHER_S {measure_all_gather()}", flush=True)
    train(Path(sys.argv[1]), prefetch="--prefetch" in sys.argv)
    dist.destroy_process_group()


def measure_all_gather() -> float:
    """The shortest of 7 times (s) of an all-gather of 4 MB, 2 MB from each rank."""
    own, whole = torch.ones(NUM_BYTES // 8), torch.empty(NUM_BYTES // 4)
    times = []
    for _ in range(7):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_gather_single(whole, own)
        times.append(time.perf_counter() - begin)
    return min(times)


def train(folder: Path, *, prefetch: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
        if prefetch:
            layer._set_unshard_async_op(True)
    fully_shard(model)
    if prefetch:
        for layer, after in pairwise(layers):
            layer.set_modules_to_forward_prefetch([after])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"memory_steps": (), "print_verdict": False, "device_interval_s": 0}
    with Recorder(model, optimizer=optimizer, path=folder, **options) as recorder:
        for _ in range(STEPS):
            with recorder.step():
                model(torch.ones(256, 512)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
    release_process_groups()
