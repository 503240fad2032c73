"""Load and choose kernels of CUDA."""

from typing import Any

import torch


def load_cuda_module(source: str, kernels: list[str]) -> Any:
    """Let the driver translate PTX for the current device."""
    from torch.cuda._utils import _cuda_load_module

    return _cuda_load_module(source, kernels)


def sleep_cycles(cycles: int) -> None:
    """Occupy the current stream."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def is_flash_enabled() -> bool:
    """Whether attention may use FlashAttention."""
    return bool(torch._C._get_flash_sdp_enabled())


def is_memory_efficient_enabled() -> bool:
    """Whether attention may use the memory-efficient kernel."""
    return bool(torch._C._get_mem_efficient_sdp_enabled())
