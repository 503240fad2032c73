"""Give public names to what a fake rank of many replaces in torch."""

import torch.utils._foreach_utils as foreach_utils
from torch.distributed._mesh_layout import _MeshLayout as MeshLayout
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_post_forward_mesh_info as get_post_forward_mesh_info,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = [
    "FSDPParam",
    "FakeStore",
    "MeshLayout",
    "ShardingPropagator",
    "get_post_forward_mesh_info",
]

PROPAGATE = "_propagate_tensor_meta_non_cached"
"""The method of `ShardingPropagator` that computes a layout on tensors of the global shape."""
foreach_devices = foreach_utils._get_foreach_kernels_supported_devices
"""The devices with multi-tensor kernels."""
