"""Read this process's rank, device and process group from torchrun's environment.

Without torchrun the process is one rank of one, or rank 0 of many emulated ranks. It uses CUDA with
NCCL if there is a GPU for each local rank, and CPU with gloo if there is no GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_inspect.emulation.network import Specification, parse_specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from instrumented_trainer.sharding_plan import Machine


@dataclass(frozen=True, slots=True)
class Runtime:
    """One process of the run."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    emulation: Specification | None = None
    """The emulated ranks; None for real ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints."""
        return self.rank == 0

    @property
    def machine(self) -> Machine:
        """The machine that the settings must fit."""
        return Machine(world_size=self.world_size, has_cuda=self.device.type == "cuda")


def read_runtime(emulation: str | None = None) -> Runtime:
    """Read this process's rank and device, before any process group exists.

    Args:
        emulation: The value of `--emulate`; None means real ranks.

    Raises:
        ConfigError: The host has fewer GPUs than ranks, the emulation is invalid, or this process
            is already one of several real ranks.
    """
    if emulation is not None:
        return _emulated_runtime(parse_specification(emulation))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Runtime(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=local_rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        device=_choose_device(local_rank),
    )


def _emulated_runtime(specification: Specification) -> Runtime:
    real = int(os.environ.get("WORLD_SIZE", "1"))
    if real > 1:
        raise ConfigError(
            f"--emulate was passed to {real} real ranks. Expected one process, which runs as "
            f"rank 0 of {specification.world_size}. Start it without torchrun: "
            "python -m instrumented_trainer --emulate ..."
        )
    return Runtime(0, 0, specification.world_size, _choose_device(0), specification)


@contextmanager
def process_group(runtime: Runtime) -> Iterator[None]:
    """Keep a default process group while the block runs; an existing group stays."""
    if dist.is_initialized():
        yield
        return
    if runtime.emulation is not None:
        with _emulated_process_group(runtime.emulation):
            yield
        return
    if runtime.device.type == "cuda":
        torch.cuda.set_device(runtime.device)
        # gloo is added to NCCL, because offloaded gradients are clipped and saved on the host.
        backend, device = "cpu:gloo,cuda:nccl", runtime.device
    else:
        backend, device = "gloo", None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # there, but not in __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        release_process_groups()


@contextmanager
def _emulated_process_group(specification: Specification) -> Iterator[None]:
    with emulate(specification):
        dist.init_process_group()
        try:
            yield
        finally:
            dist.destroy_process_group()


def _choose_device(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            f"Local rank {local_rank} has no GPU: this host has {count}. Expected a GPU for each "
            f"rank. Start torchrun with --nproc-per-node {count}, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to train on CPU."
        )
    return torch.device("cuda", local_rank)
