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
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_inspect.emulation.forecast.compiled_regions import compile_without_fusion
from fsdp_inspect.emulation.forecast.cuda_kernels import choose_cuda_kernels
from fsdp_inspect.emulation.forecast.fake_values import ValuelessTensors
from fsdp_inspect.emulation.forecast.one_device import host_for, use_one_device
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.emulation.specification import Link, Specification
from fsdp_inspect.recording.torch_api.attributes import replace_everywhere, set_attribute
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
        device_type: The device for which to choose kernels: see `cuda_kernels`, and multi-tensor
            optimizers and gradient norms.
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
