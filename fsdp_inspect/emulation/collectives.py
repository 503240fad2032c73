"""Emulate collectives: compute rank 0's result, and take the time of the emulated link.

A collective runs on torch's fake process group and then takes its time on the link. Its values come
from rank 0 alone. Gathers contain copies of rank 0's message for the other ranks; reductions omit
the other ranks' contributions. Collectives of Python objects follow the same rule and take no time.
Communication between two ranks cannot be emulated: `send` and `recv` raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fsdp_inspect.emulation.network import EmulatedNetwork
from fsdp_inspect.emulation.unit_waits import UnitWaits
from fsdp_inspect.emulation.wires import CudaWire, EmulatedMessage, HostWire, SpinningDevice, Wire
from fsdp_inspect.errors import EmulationError
from fsdp_inspect.recording.emulated_network import Transfer
from fsdp_inspect.recording.torch_api.attributes import set_attribute
from fsdp_inspect.recording.torch_api.c10d import (
    FUNCTIONALS,
    FUNCTIONS,
    ArgumentPicker,
    address_of,
    bytes_of,
    functional,
    resolve_group,
    tensors_of,
)
from fsdp_inspect.recording.torch_api.dispatch import tree_leaves
from fsdp_inspect.trace.codes import EventKind

OF_OBJECTS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "monitored_barrier",
)
"""Functions that exchange objects for control flow: their collectives take no time."""

BETWEEN_RANKS = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
)
"""Unsupported functions, which need another rank."""


class Collectives:
    """The emulated collectives of a process, each on the link of its group."""

    def __init__(
        self,
        network: EmulatedNetwork,
        waits: UnitWaits,
        spinning_device: Callable[[torch.device], SpinningDevice],
    ) -> None:
        self._network = network
        self._waits = waits
        self._spinning_device = spinning_device
        self._wires: dict[torch.device, Wire] = {}
        self._depth = 0
        """Above 0 inside a collective: inner collectives are part of it."""
        self._unwaited: dict[int, Callable[[], object]] = {}
        """The wait function of each functional collective, by the address of its result."""
        self.last_transfer: Transfer | None = None

    def attach(self, undo: ExitStack) -> None:
        """Replace torch's functions until `undo` is closed."""
        for name, (kind, argument) in FUNCTIONS.items():
            wrap = functools.partial(self._function, kind=kind, argument=argument)
            self._replace(undo, name, wrap)
        for name in OF_OBJECTS:
            self._replace(undo, name, self._without_time)
        for name in BETWEEN_RANKS:
            self._replace(undo, name, _refuse)
        for name, kind in FUNCTIONALS.items():
            original = getattr(functional, name, None)
            if original is not None:
                undo.callback(set_attribute(functional, name, self._functional(original, kind)))
        undo.callback(set_attribute(functional, "wait_tensor", self._wait_tensor()))

    def _replace(
        self, undo: ExitStack, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = getattr(c10d, name, None)
        if original is None:
            return
        replacement = wrap(original)
        undo.callback(set_attribute(c10d, name, replacement))
        if hasattr(dist, name):
            undo.callback(set_attribute(dist, name, replacement))

    # --- functions of torch.distributed

    def _function(
        self, original: Callable[..., Any], kind: EventKind, argument: str | None
    ) -> Callable[..., Any]:
        pick = ArgumentPicker(original).pick
        free = self._without_time(original)

        @functools.wraps(original)
        def emulated(*args: Any, **kwargs: Any) -> Any:
            group = pick("group", args, kwargs) or dist.group.WORLD
            if self._depth > 0 or not isinstance(group, dist.ProcessGroup):
                return free(*args, **kwargs)
            tensors = tensors_of(pick(argument, args, kwargs))
            wire = self._wire(_device_of(tensors))
            with wire.copying():
                result = free(*args, **kwargs)
            message = EmulatedMessage(kind, bytes_of(tensors), group)
            if isinstance(result, dist.Work):
                message.tensors = tensors_of(tree_leaves((args, kwargs)))
            return self._carry(message, wire, result)

        return emulated

    def _carry(self, message: EmulatedMessage, wire: Wire, work: Any) -> Any:
        """Put a collective on its link, and return the function's own result."""
        waits = self._waits
        if isinstance(work, dist.Work):
            handle, self.last_transfer = wire.handle(message, work)
            return handle
        if message.kind == EventKind.ALL_GATHER and waits.gathering is not None:
            self.last_transfer = wire.defer(message)
            if self.last_transfer is not None:
                waits.note_gather(self.last_transfer)
        elif waits.reducing is not None:
            is_scatter = message.kind == EventKind.REDUCE_SCATTER
            begin_ns = 0 if is_scatter else waits.reduced_ns
            self.last_transfer = wire.defer(message, not_before_ns=begin_ns)
            if self.last_transfer is not None:
                waits.note_reduction(self.last_transfer, is_reduce_scatter=is_scatter)
        else:
            self.last_transfer = wire.occupy(message)
        return work

    def _without_time(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def free(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return free

    # --- functional collectives

    def _functional(self, original: Callable[..., Any], kind: EventKind) -> Callable[..., Any]:
        pick = ArgumentPicker(original).pick
        free = self._without_time(original)

        @functools.wraps(original)
        def emulated(*args: Any, **kwargs: Any) -> Any:
            if self._depth > 0 or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            result = free(*args, **kwargs)
            group = resolve_group(pick("group", args, kwargs)) or dist.group.WORLD
            if not isinstance(group, dist.ProcessGroup) or not torch.is_tensor(result):
                return result
            sent = result if kind == EventKind.ALL_GATHER else (args[0] if args else result)
            message = EmulatedMessage(kind, bytes_of(tensors_of(sent)), group)
            work, self.last_transfer = self._wire(result.device).handle(message, None)
            self._unwaited[address_of(result)] = work.wait
            return result

        return emulated

    def _wait_tensor(self) -> Callable[[Any], Any]:
        original = functional.wait_tensor

        @functools.wraps(original)
        def emulated(tensor: Any) -> Any:
            if not torch.compiler.is_compiling():
                wait = self._unwaited.pop(address_of(tensor), None)
                if wait is not None:
                    wait()
            return original(tensor)  # type: ignore[no-untyped-call]

        return emulated

    # --- devices

    def _wire(self, device: torch.device) -> Wire:
        wire = self._wires.get(device)
        if wire is None:
            if device.type == "cuda":
                wire = CudaWire(self._network, self._spinning_device(device))
            else:
                wire = HostWire(self._network)
            self._wires[device] = wire
        return wire


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    """The device of a collective; the host for a collective without tensors (a barrier)."""
    return tensors[0].device if tensors else torch.device("cpu")


def _refuse(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EmulationError(
            f"torch.distributed.{original.__name__} is unsupported under emulation, because only "
            "rank 0 exists. Expected collectives, in which all ranks take part; pipelines cannot "
            "be emulated. Remove point-to-point calls from the script, or run it on real "
            "ranks."
        )

    return refuse
