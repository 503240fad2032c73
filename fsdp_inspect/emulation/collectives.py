"""Emulate collectives: compute rank 0's result, and take the time of the emulated link.

A collective runs on torch's fake process group and then takes its time on the link. Its values come
from rank 0 alone. Gathers contain copies of rank 0's message for the other ranks; reductions omit
the other ranks' contributions. Collectives of Python objects follow the same rule and take no time.
Communication between two ranks cannot be emulated: `send` and `recv` raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fsdp_inspect.emulation.network import EmulatedNetwork
from fsdp_inspect.emulation.spinning import CudaSpinBackend, make_spin
from fsdp_inspect.emulation.unit_waits import UnitWaits
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


# --- Make emulated transfers take their time: the host sleeps on CPU, a kernel spins on CUDA.
#
# A *wire* puts a collective on its link in one of three ways, by the code that waits for it:
#
# - `occupy`: the caller waits at once, as for any synchronous collective;
# - `defer`: FSDP waits later; on CPU the transfer is returned for `unit_waits`; on CUDA the stream
#   of the collective is busy, and FSDP's own events wait for it;
# - `handle`: the caller of `wait` on the returned work waits.


class Wire(Protocol):
    """Carries the collectives of one kind of device."""

    def copying(self) -> AbstractContextManager[None]:
        """Enclose the fake process group's copies of values, before the transfer is carried."""
        ...

    def occupy(self, message: EmulatedMessage) -> Transfer | None:
        """Make the caller wait, and return the transfer if the host has its times."""
        ...

    def defer(self, message: EmulatedMessage, *, not_before_ns: int = 0) -> Transfer | None:
        """Make FSDP wait for the transfer when it is needed."""
        ...

    def handle(self, message: EmulatedMessage, inner: Any) -> tuple[dist.Work, Transfer | None]:
        """Return a handle to wait with; `inner` is the handle of torch's fake process group."""
        ...


class EmulatedMessage:
    """A collective to carry."""

    __slots__ = ("group", "kind", "num_bytes", "ranks", "tensors")

    def __init__(self, kind: EventKind, num_bytes: int, group: dist.ProcessGroup) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        self.tensors: Sequence[torch.Tensor] = ()
        """All tensors that an asynchronous collective reads and writes."""
        self.group = group.group_name
        self.ranks = dist.get_process_group_ranks(group)


class HostWire:
    """CPU: the thread that needs a transfer sleeps until the transfer has ended."""

    def __init__(self, network: EmulatedNetwork) -> None:
        self._network = network

    def copying(self) -> AbstractContextManager[None]:
        """Copy in the calling thread, before the transfer begins."""
        return nullcontext()

    def occupy(self, message: EmulatedMessage) -> Transfer:
        """Issue the transfer, and sleep until its end."""
        transfer = self.defer(message)
        self._network.wait(transfer)
        return transfer

    def defer(self, message: EmulatedMessage, *, not_before_ns: int = 0) -> Transfer:
        """Issue the transfer."""
        return self._network.issue(
            message.kind,
            message.num_bytes,
            message.group,
            message.ranks,
            not_before_ns=not_before_ns,
        )

    def handle(self, message: EmulatedMessage, inner: Any) -> tuple[dist.Work, Transfer]:
        """Issue the transfer; the work's `wait` sleeps."""
        transfer = self.defer(message)
        return HostWork(inner, self._network, transfer), transfer


class HostWork(dist.Work):
    """A collective in flight on CPU."""

    def __init__(self, inner: Any, network: EmulatedNetwork, transfer: Transfer) -> None:
        super().__init__()
        self._inner = inner
        self._network = network
        self._transfer = transfer

    def wait(self, timeout: Any = None) -> bool:
        """Sleep until the transfer has ended."""
        self._network.wait(self._transfer)
        return True

    def is_completed(self) -> bool:
        """Whether the transfer has ended."""
        return self._network.has_ended(self._transfer)

    def get_future(self) -> Any:
        """The future of the fake process group, which is complete from the start."""
        return self._inner.get_future()


class CudaWire:
    """CUDA: a kernel spins for the transfer's time; each communicator runs one at a time.

    The fake process group fills outputs with copies; a gather needs one for each rank. The copies
    run on their own stream, in parallel with the spin. Copies before the spin would make every
    transfer longer, by a third for 8 ranks on NVLink. The transfer ends when both have ended.

    The current stream is the stream on which FSDP (or the script) issues the collective. Work that
    waits for that stream, or for an event on it, waits for the transfer. The times are unknown to
    the host. The recorder measures them with events on the stream, as with NCCL.
    """

    def __init__(self, network: EmulatedNetwork, device: Any) -> None:
        self._network = network
        self._device = device
        self._last: dict[str, Any] = {}
        """The end of each communicator's last transfer, as an event."""
        self._side: dict[str, Any] = {}
        self._copy_stream: Any = None
        self._copied: Any = None
        """The end of the copies of the next transfer, as an event; None: there are none."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy during the transfer. The copies must not allocate tensors that outlive them."""
        if self._copy_stream is None:
            self._copy_stream = self._device.new_stream(high_priority=True)
        copies = self._copy_stream
        copies.wait_stream(self._device.current_stream())
        with self._device.use(copies):
            yield
        self._copied = copies.record_event()

    def occupy(self, message: EmulatedMessage) -> None:
        """Spin on the current stream."""
        self._spin(message, self._device.current_stream())

    def defer(self, message: EmulatedMessage, *, not_before_ns: int = 0) -> None:
        """Spin on the current stream: FSDP's events order the dependent work."""
        self._spin(message, self._device.current_stream())

    def handle(self, message: EmulatedMessage, inner: Any) -> tuple[dist.Work, None]:
        """Spin on the communicator's own stream, as NCCL runs an asynchronous collective."""
        side = self._side.get(message.group)
        if side is None:
            side = self._side[message.group] = self._device.new_stream()
        side.wait_stream(self._device.current_stream())
        return StreamWork(inner, self._device, self._spin(message, side), message.tensors), None

    def _spin(self, message: EmulatedMessage, stream: Any) -> Any:
        last = self._last.get(message.group)
        if last is not None:
            stream.wait_event(last)
        duration = self._network.duration_ns(message.kind, message.num_bytes, message.ranks)
        self._device.spin(duration, stream)
        if self._copied is not None:
            stream.wait_event(self._copied)
            self._copied = None
        ended = self._last[message.group] = stream.record_event()
        return ended


class StreamWork(dist.Work):
    """A collective in flight on CUDA: `wait` blocks the current stream, never the host."""

    def __init__(
        self, inner: Any, device: Any, ended: Any, tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._inner = inner
        self._device = device
        self._ended = ended
        # As with NCCL, the memory of the tensors must not be reused before `wait`.
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Make later work on the current stream wait for the transfer."""
        self._device.current_stream().wait_event(self._ended)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Whether the device has passed the end of the transfer."""
        return bool(self._ended.query())

    def get_future(self) -> Any:
        """The future of the fake process group, which is complete from the start."""
        return self._inner.get_future()


class SpinningDevice:
    """A CUDA device whose streams can be kept busy for a given time."""

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        """Prepare to spin on a device.

        Args:
            device: The CUDA device.
            note: Takes one sentence when the GPU's timer cannot be used.
        """
        self._device = device
        self._spin = make_spin(CudaSpinBackend(device), note)

    def current_stream(self) -> Any:
        """The stream to which the host issues work."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self, *, high_priority: bool = False) -> Any:
        """Create a stream."""
        priority = -1 if high_priority else 0
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue to a stream inside the block."""
        return torch.cuda.stream(stream)

    def spin(self, duration_ns: int, stream: Any) -> None:
        """Keep a stream busy for a given time."""
        self._spin(duration_ns, stream)
