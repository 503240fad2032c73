"""Let emulated transfers take their time: the host sleeps on CPU, a kernel spins on CUDA.

A *wire* puts a collective on its link in one of three ways, by who waits for it:

- `occupy`: the caller, here and now, as for any synchronous collective;
- `defer`: FSDP, later; on CPU the transfer is returned for `unit_waits`, on CUDA the stream of the
  collective is busy and FSDP's own events do the rest;
- `handle`: whoever calls `wait` on the work that is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_inspect.emulation.network import EmulatedNetwork, Transfer
from fsdp_inspect.emulation.spinning import CudaSpinBackend, make_spin
from fsdp_inspect.trace.codes import EventKind


class Wire(Protocol):
    """What carries collectives of one kind of device."""

    def copying(self) -> AbstractContextManager[None]:
        """Around the fake process group's collective, which is carried next: it copies values."""
        ...

    def occupy(self, message: EmulatedMessage) -> Transfer | None:
        """The caller waits; returns the transfer where its times are known on the host."""
        ...

    def defer(self, message: EmulatedMessage, *, not_before_ns: int = 0) -> Transfer | None:
        """FSDP waits for it when it is needed."""
        ...

    def handle(self, message: EmulatedMessage, inner: Any) -> tuple[dist.Work, Transfer | None]:
        """A handle to wait with; `inner` is that of torch's fake process group."""
        ...


class EmulatedMessage:
    """A collective to be carried."""

    __slots__ = ("group", "kind", "num_bytes", "ranks", "tensors")

    def __init__(self, kind: EventKind, num_bytes: int, group: dist.ProcessGroup) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        self.tensors: Sequence[torch.Tensor] = ()
        """All that an asynchronous collective reads and writes."""
        self.group = group.group_name
        self.ranks = dist.get_process_group_ranks(group)


class HostWire:
    """CPU: the thread that needs a transfer sleeps until it has ended."""

    def __init__(self, network: EmulatedNetwork) -> None:
        self._network = network

    def copying(self) -> AbstractContextManager[None]:
        """The copies take the thread's time before the transfer begins."""
        return nullcontext()

    def occupy(self, message: EmulatedMessage) -> Transfer:
        """Issue it, and sleep."""
        transfer = self.defer(message)
        self._network.wait(transfer)
        return transfer

    def defer(self, message: EmulatedMessage, *, not_before_ns: int = 0) -> Transfer:
        """Issue it."""
        return self._network.issue(
            message.kind,
            message.num_bytes,
            message.group,
            message.ranks,
            not_before_ns=not_before_ns,
        )

    def handle(self, message: EmulatedMessage, inner: Any) -> tuple[dist.Work, Transfer]:
        """Issue it; the work's `wait` sleeps."""
        transfer = self.defer(message)
        return HostWork(inner, self._network, transfer), transfer


class HostWork(dist.Work):
    """A collective on its way, on CPU."""

    def __init__(self, inner: Any, network: EmulatedNetwork, transfer: Transfer) -> None:
        super().__init__()
        self._inner = inner
        self._network = network
        self._transfer = transfer

    def wait(self, timeout: Any = None) -> bool:
        """Sleep until it has ended."""
        self._network.wait(self._transfer)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended by now."""
        return self._network.has_ended(self._transfer)

    def get_future(self) -> Any:
        """The future of the fake process group, which is done from the start."""
        return self._inner.get_future()


class CudaWire:
    """CUDA: a kernel spins for the transfer's time, one at a time for each communicator.

    The fake process group fills outputs with copies, in a gather one for each rank. They run on a
    stream of their own beside the spin. Before it they would make every transfer longer, by a third
    for 8 ranks on NVLink. The transfer ends when both have ended.

    The current stream is the one that FSDP (or the script) issues the collective on; what waits
    for that stream, or for an event on it, waits for the transfer. No host time is known: the
    recorder measures with events on the stream, as it does with NCCL.
    """

    def __init__(self, network: EmulatedNetwork, device: Any) -> None:
        self._network = network
        self._device = device
        self._last: dict[str, Any] = {}
        """The end of the last transfer of each communicator, as an event."""
        self._side: dict[str, Any] = {}
        self._copy_stream: Any = None
        self._copied: Any = None
        """The end of the copies of the next transfer, as an event; None: there are none."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies run beside the transfer. They must not allocate what outlives them."""
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
        """Spin on the current stream: FSDP's events order what depends on it."""
        self._spin(message, self._device.current_stream())

    def handle(self, message: EmulatedMessage, inner: Any) -> tuple[dist.Work, None]:
        """Spin on a stream of the communicator's own, as NCCL runs an asynchronous collective."""
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
    """A collective on its way, on CUDA: `wait` holds the current stream, never the host."""

    def __init__(
        self, inner: Any, device: Any, ended: Any, tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._inner = inner
        self._device = device
        self._ended = ended
        # As with NCCL: their memory must not be used again before `wait`.
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """What is put on the current stream from now on runs behind it."""
        self._device.current_stream().wait_event(self._ended)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Whether the device has come past it."""
        return bool(self._ended.query())

    def get_future(self) -> Any:
        """The future of the fake process group, which is done from the start."""
        return self._inner.get_future()


class SpinningDevice:
    """A CUDA device whose streams can be kept busy for a time."""

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        """Prepare to spin on a device.

        Args:
            device: The CUDA device.
            note: Takes one sentence when the GPU's timer cannot be used.
        """
        self._device = device
        self._spin = make_spin(CudaSpinBackend(device), note)

    def current_stream(self) -> Any:
        """The stream that the host issues to."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self, *, high_priority: bool = False) -> Any:
        """A stream of its own."""
        priority = -1 if high_priority else 0
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """The host issues to a stream inside the block."""
        return torch.cuda.stream(stream)

    def spin(self, duration_ns: int, stream: Any) -> None:
        """Keep a stream busy."""
        self._spin(duration_ns, stream)
