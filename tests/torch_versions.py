"""What some versions of torch lack: a test that needs it skips, and names the version."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common


def placement_result_or_skip() -> Any:
    """The class with which `shard_placement_fn` chooses a mesh; skips the test if there is none."""
    found = getattr(_fsdp_common, "ShardPlacementResult", None)
    if found is None:
        pytest.skip(f"torch {torch.__version__} has no ShardPlacementResult, torch 2.13 has it")
    return found
