"""Run code for CUDA devices without CUDA: every device is the host of the fake tensors.

A builder does what a training script does before its first step, so it may call `model.to("cuda")`,
`torch.device("cuda", rank)`, `init_device_mesh("cuda", ...)`, `torch.cuda.set_device(...)` and
`init_process_group("nccl")`. In a forecast all fake tensors are CPU tensors, whatever device the
code requests. Where torch chooses by device what to save, `cuda_kernels` chooses for that device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from fsdp_inspect.recording.torch_api.attributes import set_attribute

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
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _HOST, *args[2:])  # a number is the index of a CUDA device
        on_host = {name: host_for(value) for name, value in (kwargs or {}).items()}
        if func is torch.device and _HOST in (*map(host_for, args[:1]), on_host.get("type")):
            return torch.device(_HOST)  # without a device index
        return func(*map(host_for, args), **on_host)


def _without_effect() -> Callable[..., None]:
    """Return a new function each time: torch's compiler keeps one rule for each function."""

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return do_nothing
