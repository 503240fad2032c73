"""Give public names to torch's dispatch modes, fake tensors, trees of tensors and storages."""

from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode as current_dispatch_mode,
    _get_current_dispatch_mode_stack as dispatch_modes,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "active_fake_mode",
    "current_dispatch_mode",
    "dispatch_modes",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "tree_leaves",
    "tree_map",
    "unset_fake_temporarily",
]

count_references = getattr(torch._C, "_storage_Use_Count", None)
"""References to a storage, by its key (torch 2.4 to 2.13)."""


def storage_key(storage: Any) -> int:
    """The address of torch's own storage object, which fake tensors also have."""
    return int(storage._cdata)


def schema_of(operator: Any) -> Any:
    """The schema of an operator of the dispatcher; None for another function."""
    return getattr(operator, "_schema", None)


def without_backend_select(keys: Any) -> Any:
    """A set of dispatch keys without `BackendSelect`."""
    return keys.remove(torch._C.DispatchKey.BackendSelect)


def destroy_library(library: Any) -> None:
    """Remove the kernels of a `torch.library.Library`."""
    library._destroy()
