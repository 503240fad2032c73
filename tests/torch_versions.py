"""What some versions of torch lack: a test that needs it skips, and names the version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common

from fsdp_inspect import Plan, apply_plan
from fsdp_inspect.errors import PlanError

PINNED = "2.13.0"
"""The version of which the tests pin private names and behaviour."""


def needs_torch(version: str, reason: str) -> None:
    """Skip the test with an older torch.

    Args:
        version: The first version that has it, such as `2.13`.
        reason: What the older ones do or lack.
    """
    if release() < tuple(map(int, version.split("."))):
        pytest.skip(f"torch {torch.__version__} {reason}; torch {version} is the first without it")


def apply_or_skip(model: nn.Module, plan: Plan) -> Plan:
    """Apply a plan; skips the test if this torch lacks a setting of the plan."""
    try:
        return apply_plan(model, plan)
    except PlanError as error:
        if "Install torch" not in str(error):
            raise
        pytest.skip(str(error))


def needs_pinned_torch() -> None:
    """Skip a test that pins names of one version."""
    if torch.__version__.split("+")[0] != PINNED:
        pytest.skip(f"This test pins torch {PINNED}, and torch {torch.__version__} is installed")


def release() -> tuple[int, ...]:
    """The installed version as numbers."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def placement_result_or_skip() -> Any:
    """The class with which `shard_placement_fn` chooses a mesh; skips the test if there is none."""
    found = getattr(_fsdp_common, "ShardPlacementResult", None)
    if found is None:
        pytest.skip(f"torch {torch.__version__} has no ShardPlacementResult, torch 2.13 has it")
    return found
