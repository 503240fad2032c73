"""Turn a process into rank 0 of N with fake tensors, which use no memory.

Inside `fake_rank` tensors have shapes, dtypes and storages with a size, but no contents. The
process group is the emulated one of `emulation.process`, with links that take no time. FSDP2's own
code runs on both, so it allocates and frees the same tensors at the same points as on real ranks.

[Note: What has to be real]
A `DeviceMesh` reads its ranks back into Python, which a fake tensor cannot answer: meshes are made
outside the fake mode. torch 2.13 derives everything from a mesh's ranks through the three functions
patched here; `tests/emulation/forecast/test_fake_rank.py` checks this by version.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fsdp_inspect.emulation.forecast.compiled_regions import compile_without_fusion
from fsdp_inspect.emulation.forecast.fake_values import ValuelessTensors
from fsdp_inspect.emulation.network import Link, Specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.errors import ForecastError
from fsdp_inspect.recording.torch_api.attributes import replace_everywhere, set_attribute
from fsdp_inspect.recording.torch_api.cuda import (
    is_flash_enabled,
    is_memory_efficient_enabled,
)
from fsdp_inspect.recording.torch_api.dispatch import FakeTensor, unset_fake_temporarily
from fsdp_inspect.recording.torch_api.fake_ranks import (
    PROPAGATE,
    FSDPParam,
    ShardingPropagator,
    foreach_devices,
    get_post_forward_mesh_info,
    mesh_layout,
    register_collectives,
)

_FREE = Link(bandwidth_bytes_per_s=float("inf"), latency_ns=0)


@contextmanager
def fake_rank(
    world_size: int,
    *,
    gpus_per_node: int,
    device_type: Literal["cuda", "cpu"],
    compiles: bool = True,
) -> Iterator[ValuelessTensors]:
    """Run the block as rank 0 of `world_size` ranks, on fake CPU tensors.

    Args:
        world_size: Ranks of the job.
        gpus_per_node: Ranks on one node, the value of `LOCAL_WORLD_SIZE`.
        device_type: The device for which to choose kernels: see `choose_cuda_kernels`, and
            multi-tensor optimizers and gradient norms.
        compiles: Whether `torch.compile` compiles; False: its regions run as eager code.

    Yields:
        The mode of the fake tensors, which records whether a value was read.

    Raises:
        EmulationError: This process already has a process group, or is one of several ranks.
    """
    specification = Specification(
        world_size=world_size, gpus_per_node=gpus_per_node, intra=_FREE, inter=_FREE
    )
    with emulate(specification), ExitStack() as undo:
        dist.init_process_group()
        undo.callback(dist.destroy_process_group)
        register_collectives()
        _make_meshes_real(undo)
        _keep_layouts_apart(undo)
        undo.enter_context(warnings.catch_warnings())
        # Copies of modules read the address of their weights, which has no effect here.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        tensors = undo.enter_context(ValuelessTensors())
        if compiles:
            compile_without_fusion(undo)
        else:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        use_one_device(undo)
        _let_tensors_be_swapped(undo, tensors)
        _pin_nothing(undo)
        if device_type == "cuda":
            _copy_from_host(undo)
            _prefer_foreach(undo)
            choose_cuda_kernels(undo)
        yield tensors


def _make_meshes_real(undo: ExitStack) -> None:
    """Run the construction of meshes on real tensors. See [Note: What has to be real]."""
    initialise = DeviceMesh.__init__

    @functools.wraps(initialise)
    def init(itself: DeviceMesh, /, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            for name in ("_rank_map", "mesh"):  # 0, 1, ..., N - 1; torch 2.9 has `mesh`
                ranks = kwargs.get(name)
                if isinstance(ranks, FakeTensor):
                    numbers = torch.arange(ranks.numel(), dtype=ranks.dtype)
                    kwargs[name] = numbers.view(ranks.shape)
            if "device_type" in kwargs:
                kwargs["device_type"] = host_for(kwargs["device_type"])
            initialise(itself, *map(host_for, args), **kwargs)

    undo.callback(set_attribute(DeviceMesh, "__init__", init))
    layout = mesh_layout()
    if layout is not None:
        remapped = _outside(layout.remap_to_tensor)
        undo.callback(set_attribute(layout, "remap_to_tensor", remapped))
    replace_everywhere(undo, {get_post_forward_mesh_info: _outside(get_post_forward_mesh_info)})


def _keep_layouts_apart(undo: ExitStack) -> None:
    """Make DTensor compute its layouts under a separate fake mode.

    DTensor computes the layout of each operation once per process, on tensors of the global shape,
    under the active fake mode. The storage tracker would count these tensors, but only the first
    time.
    """
    propagate = getattr(ShardingPropagator, PROPAGATE)
    undo.callback(set_attribute(ShardingPropagator, PROPAGATE, _outside(propagate)))


def _let_tensors_be_swapped(undo: ExitStack, tensors: ValuelessTensors) -> None:
    """Allow moving a module's parameters (`to_empty`), including those that no unit manages.

    Under a fake mode torch moves a parameter by swapping it with another tensor. torch refuses to
    swap if there is a weak reference to it, and the mode keeps one to each tensor from another
    device.
    """
    swap = torch.utils.swap_tensors

    def forgotten_and_swapped(first: torch.Tensor, second: torch.Tensor) -> None:
        tensors.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)  # type: ignore[no-untyped-call]

    replace_everywhere(undo, {swap: forgotten_and_swapped})


def _pin_nothing(undo: ExitStack) -> None:
    """Ignore pinning: it changes no size, and fake tensors cannot be pinned."""

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        return tensor

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        return True

    undo.callback(set_attribute(torch.Tensor, "pin_memory", pin_memory))
    undo.callback(set_attribute(torch.Tensor, "is_pinned", is_pinned))


def _copy_from_host(undo: ExitStack) -> None:
    """Copy an offloaded shard before its all-gather: here, host and device are one device."""
    inputs = FSDPParam.all_gather_inputs
    assert isinstance(inputs, property)
    read = inputs.fget
    assert read is not None

    def copied(param: FSDPParam) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = read(param)
        return [tensor.clone() for tensor in tensors] if param.offload_to_cpu else tensors

    undo.callback(set_attribute(FSDPParam, "all_gather_inputs", property(copied)))


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, run outside the fake mode on real tensors."""

    @functools.wraps(function)
    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return real


def _prefer_foreach(undo: ExitStack) -> None:
    """Make multi-tensor ("foreach") kernels torch's default, as on CUDA."""

    def with_cpu() -> list[str]:
        return [*foreach_devices(), "cpu"]

    replace_everywhere(undo, {foreach_devices: with_cpu})


# --- Make fake CPU tensors save what CUDA's kernels save for backward.
#
# A forecast runs on fake CPU tensors, and torch chooses some kernels by device. Where the choice
# changes the saved tensors, a replacement chooses as torch 2.13 does on CUDA:
#
# attention     flash attention (output, log-sum-exp), the memory-efficient one where flash does
#               not apply, or the math one, which saves all scores; `torch.nn.attention.
#               sdpa_kernel` excludes kernels, as on CUDA: torch
#               aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
# rms_norm      one kernel that saves its input, its weight and 1 / rms in float32; CPU uses six
#               operations, which save float32 copies
# dropout       one kernel that saves a mask of one byte an element
#
# Only shapes and dtypes of the results are correct: these tensors have no contents. In a region of
# `torch.compile`, rms_norm and dropout stay as they are: on all devices, the compiler splits them
# into the same operators.

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_DIM = 256


def choose_cuda_kernels(undo: ExitStack) -> None:
    """Replace torch's functions until `undo` is closed."""
    replace_everywhere(
        undo,
        {
            F.scaled_dot_product_attention: _attend,
            F.rms_norm: _rms_norm,
            torch.rms_norm: _rms_norm,
            F.dropout: _drop,
            torch.dropout: _drop,
        },
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend: (B, H, T, D) queries, (B, K, S, D) keys and values to (B, H, T, D).

    Raises:
        ForecastError: The key heads do not divide the query heads. Fake kernels would not fail.
    """
    if query.dim() == 4 and query.shape[1] > 1 and query.shape[1] % key.shape[1]:
        raise ForecastError(
            f"{key.shape[1]} key heads do not divide {query.shape[1]} query heads of attention. "
            "Expected a divisor. Change one of the two: num_key_value_heads and "
            "num_attention_heads in a config of Hugging Face."
        )
    scale, is_grouped = options.get("scale"), query.shape[1] != key.shape[1]
    result: Sequence[torch.Tensor]
    if _is_flash(query, value, attn_mask):
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        result = flash(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif is_memory_efficient_enabled() and query.dim() == 4 and not is_grouped:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        wanted = any(tensor.requires_grad for tensor in (query, key, value))
        mask = _additive(attn_mask, query, key)
        result = efficient(query, key, value, mask, wanted, dropout_p, is_causal, scale=scale)
    else:
        attend = torch.ops.aten._scaled_dot_product_attention_math.default
        result = attend(query, key, value, attn_mask, dropout_p, is_causal, None, **options)
    return result[0]


def _is_flash(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return (
        mask is None
        and is_flash_enabled()
        and query.dim() == 4
        and query.dtype in _FLASH_DTYPES
        and query.shape[-1] == value.shape[-1] <= _MAX_FLASH_HEAD_DIM
    )


def _additive(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """The mask in the form that the kernel requires: numbers to add, (B, H, T, S)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    return mask.expand(*query.shape[:3], key.shape[2])


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        plain: torch.Tensor = torch.ops.aten.rms_norm.default(
            input, list(normalized_shape), weight, eps
        )
        return plain
    normed: torch.Tensor = _FusedRMSNorm.apply(  # type: ignore[no-untyped-call]
        input, weight, len(normalized_shape)
    )
    return normed


class _FusedRMSNorm(torch.autograd.Function):
    """Saves and allocates the same tensors as `aten::_fused_rms_norm` on CUDA."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dims: int) -> Any:
        kept = input.shape[: input.dim() - dims] + (1,) * dims
        ctx.save_for_backward(input, weight, input.new_empty(kept, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


def _drop(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    dropped: torch.Tensor
    if torch.compiler.is_compiling():
        dropped = torch.ops.aten.dropout.default(input, p, True)
    else:
        dropped = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped


# --- Run code for CUDA devices without CUDA: every device is the host of the fake tensors.
#
# A builder does what a training script does before its first step, so it may call
# `model.to("cuda")`, `torch.device("cuda", rank)`, `init_device_mesh("cuda", ...)`,
# `torch.cuda.set_device(...)` and `init_process_group("nccl")`. In a forecast all fake tensors are
# CPU tensors, whatever device the code requests. Where torch chooses by device what to save,
# `choose_cuda_kernels` chooses for that device.

_WITHOUT_EFFECT = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
"""Functions of `torch.cuda` that training scripts call and that allocate nothing."""
_HOST = "cpu"


def use_one_device(undo: ExitStack) -> None:
    """Make code for CUDA run on CPU tensors until `undo` is closed; requires a process group."""
    undo.enter_context(_OneDevice())
    for name in _WITHOUT_EFFECT:
        undo.callback(set_attribute(torch.cuda, name, _without_effect()))
    undo.callback(set_attribute(torch.cuda, "current_device", lambda: 0))
    for module in (dist, c10d):
        undo.callback(set_attribute(module, "init_process_group", _without_effect()))
    enter = torch.autocast.__init__

    @functools.wraps(enter)
    def init(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(context, host_for(device_type), *args, **kwargs)

    undo.callback(set_attribute(torch.autocast, "__init__", init))


def host_for(value: Any) -> Any:
    """The host instead of a CUDA device, as `torch.device` or as text; other values unchanged."""
    if isinstance(value, torch.device):
        return torch.device(_HOST) if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return _HOST
    return value


class _OneDevice(TorchFunctionMode):
    """Makes torch's functions use the host instead of a CUDA device."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            return func(args[0])  # most calls read a property
        if func in _CHUNKS:
            return _chunk(*args, **(kwargs or {}))
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _HOST, *args[2:])  # a number is the index of a CUDA device
        is_long = args and isinstance(args[0], (list, tuple)) and len(args[0]) > _MOST_TENSORS
        if is_long and getattr(func, "__name__", "").startswith(_ON_LISTS):
            return _in_slices(func, args, kwargs or {})
        on_host = {name: host_for(value) for name, value in (kwargs or {}).items()}
        if func is torch.device and _HOST in (*map(host_for, args[:1]), on_host.get("type")):
            return torch.device(_HOST)  # without a device index
        return func(*map(host_for, args), **on_host)


_ON_LISTS = ("_foreach_", "_fused_")
_MOST_TENSORS = 16


def _in_slices(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on lists of tensors in slices of the lists, which changes no storage.

    torch derives the layout of each DTensor of a list by a look at all of them: for the hundreds of
    parameters of an optimizer that takes seconds.
    """
    count = len(args[0])
    results: list[Any] = []
    for start in range(0, count, _MOST_TENSORS):
        part = slice(start, start + _MOST_TENSORS)

        def cut(value: Any, part: slice = part) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == count
            return value[part] if is_list else value

        found = func(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
        results.extend(found or ())
    return results or None


_CHUNKS = (torch.chunk, torch.Tensor.chunk)


def _chunk(tensor: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """`torch.chunk`, with one view for all whole chunks but the first.

    FSDP2 splits each parameter over all ranks and uses the part of its own, here the first. The
    views of a fake tensor differ in their offsets only, and hundreds of them take seconds.
    """
    length = tensor.shape[dim]
    size = max(-(-length // chunks), 1)
    whole, rest = divmod(length, size)
    if whole < 3:
        return torch.Tensor.chunk(tensor, chunks, dim)
    first, other = (tensor.narrow(dim, start, size) for start in (0, size))
    last = (tensor.narrow(dim, whole * size, rest),) if rest else ()
    return (first, *(other,) * (whole - 1), *last)


def _without_effect() -> Callable[..., None]:
    """Return a new function each time: torch's compiler keeps one rule for each function."""

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return do_nothing
