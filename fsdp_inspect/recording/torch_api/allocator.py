"""Read the history and the snapshot of CUDA's allocator."""

from typing import Any

import torch


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
