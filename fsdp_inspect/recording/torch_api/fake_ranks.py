"""Give public names to what a fake rank of many replaces in torch."""

from importlib import import_module
from typing import Any

import torch
import torch.utils._foreach_utils as foreach_utils
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_post_forward_mesh_info as get_post_forward_mesh_info,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = [
    "FSDPParam",
    "FakeStore",
    "ShardingPropagator",
    "get_post_forward_mesh_info",
]


def mesh_layout() -> Any:
    """The class that lays out the ranks of a mesh; None if torch has none (2.9)."""
    try:
        return import_module("torch.distributed._mesh_layout")._MeshLayout
    except ImportError:
        return None


def register_collectives() -> None:
    """Make collectives accept fake tensors; torch 2.9 registers this in a module of its own."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):
        import_module("torch.distributed._tools.fake_collectives")


PROPAGATE = "_propagate_tensor_meta_non_cached"
"""The method of `ShardingPropagator` that computes a layout on tensors of the global shape."""
foreach_devices = foreach_utils._get_foreach_kernels_supported_devices
"""The devices with multi-tensor kernels."""
