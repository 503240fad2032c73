"""Give public names to torch's dispatch modes, fake tensors, trees of tensors and storages."""

from collections.abc import Iterable
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
    _get_current_dispatch_mode_stack as dispatch_modes,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DEVICE_QUERY",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "QuickFakeTensorMode",
    "TorchDispatchMode",
    "active_fake_mode",
    "device_of_fake",
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


DEVICE_QUERY = torch.ops.prim.device.default
"""The operator that returns a tensor's device. torch's C++ code runs it often on fake tensors."""


def device_of_fake(tensor: Any) -> Any:
    """The result of `DEVICE_QUERY`, without a pass through the other dispatch modes."""
    if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return DEVICE_QUERY(tensor)


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose cached operations are found in less time.

    torch keeps the shapes of results by a key of the operator and its arguments. To make the key it
    reads 17 properties of each tensor, which takes a quarter of a forecast. For strided tensors
    without symbolic sizes, eleven of them determine the others. To make a tensor of a kept shape it
    sets 22 attributes one by one, which takes a fifth; here, they are copied at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def _prep_args_for_hash(self, result: list[Any], args: Iterable[Any], *state: Any) -> None:
        """Append what identifies the arguments to `result`."""
        if isinstance(args, dict) or self.shape_env is not None:
            super()._prep_args_for_hash(result, args, *state)
            return
        if isinstance(args, (list, tuple)):
            result += (type(args), len(args))
        for value in args:
            kind = type(value)
            if kind in _PLAIN:
                result += (kind, value)
            elif kind is FakeTensor and self._is_static(value):
                result += (
                    *(kind, value.dtype, value.shape, value.stride(), value.fake_device),
                    *(value.storage_offset(), value.untyped_storage().nbytes()),
                    *(value.requires_grad, value.is_inference(), value.is_quantized),
                    *(value.is_conj(), value.is_neg()),
                )
            elif kind in (list, tuple, torch.Size):
                self._prep_args_for_hash(result, value, *state)
            else:
                super()._prep_args_for_hash(result, [value], *state)

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, *call: Any) -> Any:
        """The result of an operator that is known; the last of `call` are its arguments."""
        kept = entry.metadata
        if kept is None or entry.inplace_idx is not None or not self._is_plain(kept):
            return super()._get_output_tensor_from_cache_entry(state, entry, *call)
        made = torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device="meta")
        if entry.view_idx is not None:
            storage = call[-1][entry.view_idx].untyped_storage()
            made.set_(storage, kept.storage_offset, kept.shape, kept.stride)
        return self._make_fake(made, kept.device, requires_grad=kept.requires_grad)

    def _is_plain(self, kept: Any) -> bool:
        is_strided = kept.layout is torch.strided and self.shape_env is None
        return is_strided and not (kept.is_conj or kept.is_neg)

    def _make_fake(
        self, made: torch.Tensor, device: torch.device, *, requires_grad: bool
    ) -> FakeTensor:
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = vars(FakeTensor(self, made, device)).copy()
        fake = torch.Tensor._make_subclass(
            FakeTensor, made, requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        if self._allow_unsafe_data_ptr_access:  # torch's default; `copy.deepcopy` requires it
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake

    def _is_static(self, tensor: FakeTensor) -> bool:
        is_ours = tensor.fake_mode is self and tensor.constant is None
        return is_ours and tensor.layout is torch.strided


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})


def schema_of(operator: Any) -> Any:
    """The schema of an operator of the dispatcher; None for another function."""
    return getattr(operator, "_schema", None)


def without_backend_select(keys: Any) -> Any:
    """A set of dispatch keys without `BackendSelect`."""
    return keys.remove(torch._C.DispatchKey.BackendSelect)


def destroy_library(library: Any) -> None:
    """Remove the kernels of a `torch.library.Library`."""
    library._destroy()
