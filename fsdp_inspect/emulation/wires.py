"""Make emulated transfers take their time: the host sleeps on CPU, a kernel spins on CUDA.

A *wire* puts a collective on its link in one of three ways, by the code that waits for it:

- `occupy`: the caller waits at once, as for any synchronous collective;
- `defer`: FSDP waits later; on CPU the transfer is returned for `unit_waits`; on CUDA the stream of
  the collective is busy, and FSDP's own events wait for it;
- `handle`: the caller of `wait` on the returned work waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_inspect.emulation.network import EmulatedNetwork
from fsdp_inspect.emulation.spinning import CudaSpinBackend, make_spin
from fsdp_inspect.recording.emulated_network import Transfer
from fsdp_inspect.trace.codes import EventKind


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
