"""Load and choose kernels of CUDA, and read the history of its allocator."""

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


# --- Read the history and the snapshot of CUDA's allocator.


def start_history(max_entries: int) -> None:
    """Keep the Python stacks of the last allocations."""
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=max_entries
    )


def stop_history() -> None:
    """End the history."""
    torch.cuda.memory._record_memory_history(None)


def is_history_enabled() -> bool:
    """Whether CUDA records a history of allocations now; False if torch does not report it."""
    ask = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(ask()) if ask is not None else False


def take_snapshot() -> Any:
    """The state of the allocator, in the format of torch's memory_viz page."""
    return torch.cuda.memory._snapshot()
