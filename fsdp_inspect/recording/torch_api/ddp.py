"""Read the private state of `DistributedDataParallel`. No other file uses it.

Written for torch 2.13 (`torch/nn/parallel/distributed.py`, `reducer.cpp`);
`tests/recording/torch_api` pins that version, so a new torch version must be checked first.

A unit is a bucket of DDP's reducer: the gradients that one all-reduce sums. The reducer assigns
parameters to buckets when the model is wrapped. After the first backward passes, which show the
order of ready gradients, it assigns them again. After that, buckets do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect.recording.torch_api.engine_names import is_engine
from fsdp_inspect.recording.torch_api.module_unit import WholeParameterBucket
from fsdp_inspect.recording.torch_api.modules import enclosing_modules, strip_wrappers
from fsdp_inspect.trace.codes import MemoryCategory


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHandle(WholeParameterBucket):
    """A unit: one bucket of a model."""

    wrapper: DistributedDataParallel
    buffer: BucketBuffer = field(compare=False)

    # --- `recording.unit_handle.UnitHandle`

    @property
    def key(self) -> DistributedDataParallel:
        """The wrapped model, which owns all its buckets."""
        return self.wrapper

    @property
    def fqns(self) -> tuple[str, ...]:
        """The fewest modules that together contain the parameters of the bucket."""
        return enclosing_modules(self.wrapper.module, self.names, self.prefix)

    @property
    def full_gradients(self) -> tuple[()]:
        """Empty: the reducer copies each gradient into its bucket when the gradient is ready."""
        return ()

    @property
    def reduced_gradients(self) -> list[torch.Tensor]:
        """The gradients that the optimizer sees."""
        gradients = (parameter.grad for parameter in self.parameters)
        return [gradient for gradient in gradients if gradient is not None]

    @property
    def kept_buffers(self) -> list[tuple[MemoryCategory, torch.Tensor]]:
        """The buffer of the bucket, once an all-reduce has shown it."""
        tensor = self.buffer.tensor()
        return [] if tensor is None else [(MemoryCategory.REDUCE_SCATTER_BUFFER, tensor)]

    @property
    def reduces_gradients(self) -> bool:
        """Whether the backward that runs now reduces the gradients: False under `no_sync`."""
        return bool(self.wrapper.require_backward_grad_sync)

    # --- sizes and settings

    @property
    def group(self) -> ProcessGroup:
        """The ranks that reduce."""
        group: ProcessGroup = self.wrapper.process_group
        return group


class BucketBuffer:
    """The storage of a bucket, which the reducer owns. The reference is weak."""

    def __init__(self) -> None:
        self._reference: StorageWeakRef | None = None

    def note(self, message: torch.Tensor) -> None:
        """Note the tensor that the reducer all-reduces; a sparse one has no bucket."""
        if message.layout is torch.strided:
            storage = message.untyped_storage()
            self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def tensor(self) -> torch.Tensor | None:
        """A tensor on the storage; None if it is unknown or freed."""
        reference: Any = self._reference
        if reference is None or reference.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_joined(wrapper: DistributedDataParallel) -> bool:
    """Whether the script has put the model into torch's `Join`, for uneven inputs."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def find_wrappers(model: nn.Module) -> list[tuple[str, DistributedDataParallel]]:
    """The wrapped models in a model, with the fqn of each, without wrapper segments."""
    return [
        (strip_wrappers(name), module)
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]


def names_in(model: nn.Module) -> Callable[[str], str]:
    """Returns the fqn of a module or parameter of a model without the segments of wrappers.

    DDP and the engines of DeepSpeed call the wrapped model `module`, which other models may have,
    too.
    """
    inner = [
        (name, f"{name}.module".lstrip("."))
        for name, each in model.named_modules()
        if isinstance(each, DistributedDataParallel) or is_engine(each)
    ]

    def name_of(name: str) -> str:
        for outer, wrapped in inner:
            if name == wrapped or name.startswith(f"{wrapped}."):
                return strip_wrappers(f"{outer}{name.removeprefix(wrapped)}".lstrip("."))
        return strip_wrappers(name)

    return name_of


def find_buckets(prefix: str, wrapper: DistributedDataParallel) -> list[BucketHandle]:
    """The current buckets of a wrapped model, in the order of their all-reduces.

    The reducer returns its buckets with zeros in place of the gradients. Fake tensors replace these
    zeros, so that this call allocates nothing.
    """
    names = {
        key: f"{prefix}.{strip_wrappers(name)}".removeprefix(".")
        for key, name in _names_of_parameters(wrapper).items()
    }
    with FakeTensorMode(allow_non_fake_inputs=True):
        buckets: list[Any] = wrapper.reducer._get_zeros_like_grad_buckets()
        contents = [(each.parameters(), each.buffer().dtype) for each in buckets]
    return [
        BucketHandle(
            wrapper=wrapper,
            prefix=prefix,
            bucket=place,
            names=tuple(names[id(parameter)] for parameter in parameters),
            parameters=tuple(parameters),
            dtype=dtype,
            buffer=BucketBuffer(),
        )
        for place, (parameters, dtype) in enumerate(contents)
    ]


_NAMES: WeakKeyDictionary[DistributedDataParallel, dict[int, str]] = WeakKeyDictionary()
"""The names of the parameters of each wrapper, by `id`. The wrapper keeps its parameters."""


def _names_of_parameters(wrapper: DistributedDataParallel) -> dict[int, str]:
    """The names of the reducer's parameters, by `id`.

    Tensor parallelism under DDP takes the parameters out of the module in the first forward. Their
    names come from an earlier call. Without one, a parameter has its number as its name.
    """
    known = _NAMES.setdefault(wrapper, {})
    known.update((id(each), name) for name, each in wrapper.module.named_parameters())
    for place, parameter in enumerate(wrapper._module_parameters):
        known.setdefault(id(parameter), f"parameter {place}")
    return known


def has_rebuilt_buckets(wrapper: DistributedDataParallel) -> bool:
    """Whether the reducer has assigned the parameters to buckets a second time."""
    return bool(wrapper._has_rebuilt_buckets)


def has_final_buckets(wrapper: DistributedDataParallel) -> bool:
    """Whether the buckets no longer change.

    torch 2.13, `Reducer::should_rebuild_buckets`: with unused parameters the order of the gradients
    may change, so the first assignment stays.
    """
    stays = wrapper.find_unused_parameters and not wrapper.static_graph
    return stays or has_rebuilt_buckets(wrapper)


def comm_hooks_of(wrapper: DistributedDataParallel) -> list[str]:
    """The names of the communication hooks that replace the all-reduces of buckets."""
    hooks = getattr(wrapper, "_comm_hooks", [])
    return [getattr(hook, "__name__", repr(hook)) for hook, _ in hooks]


def reduced_dtype_of(bucket: BucketHandle) -> torch.dtype:
    """The dtype in which the ranks reduce a bucket: torch's hooks can compress it."""
    names = comm_hooks_of(bucket.wrapper)
    if any("bf16_compress" in name for name in names):
        return torch.bfloat16
    return torch.float16 if any("fp16_compress" in name for name in names) else bucket.dtype


def leaves_parameters_unused(wrapper: DistributedDataParallel) -> bool:
    """Whether the backward that ends now used not every parameter, on this rank.

    Known with `find_unused_parameters` only, before the reducer waits for its buckets.
    """
    return not bool(wrapper.reducer._get_local_used_map().all())


def ddp_settings_of(wrapper: DistributedDataParallel) -> dict[str, str]:
    """The settings that change the schedule or the memory, as text."""
    logged: dict[str, Any] = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    cap = logged.get("bucket_cap_bytes")
    hooks = ", ".join(comm_hooks_of(wrapper))
    return {
        **({"comm_hooks": hooks} if hooks else {}),
        "bucket_cap_mb": f"{cap / 2**20:.3g}" if isinstance(cap, int) else "unknown",
        "find_unused_parameters": str(bool(wrapper.find_unused_parameters)),
        "static_graph": str(bool(wrapper.static_graph)),
        "gradient_as_bucket_view": str(bool(wrapper.gradient_as_bucket_view)),
    }


def skip_all_reduces() -> None:
    """Make each wrapped model keep this rank's own gradients; buffers are broadcast as before."""
    original = DistributedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        reduces, shares = self.require_backward_grad_sync, self.require_forward_param_sync
        self.require_backward_grad_sync = False
        self._static_graph_delay_allreduce_enqueued = True
        try:
            return original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_backward_grad_sync = reduces
            self.require_forward_param_sync = shares

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
