"""When did it happen? Marks on the host clock (CPU) or on device streams (CUDA).

A clock hands out *marks*: a mark is taken now, cheaply, and read later as nanoseconds on the
host's monotonic clock (`time.perf_counter_ns`). On CPU a mark is the time itself. On CUDA a mark
is an event recorded on a stream; it is read a step or more later, when the event has completed,
and nothing here ever synchronises after attach.

[Note: Device time on the host clock]
The reference is not an event on the compute stream, which would run late by as much as the host
is ahead, but one on an own, otherwise idle stream: one at attach (synchronised once), one more at
each step (`CudaClock.advance`). Each such *anchor* bounds the offset between the two clocks from
below, since an event cannot run before the host has recorded it:

    offset >= host time before record - device time of the anchor

The tightest bound of the last `_ENVELOPE` anchors is used, so that the drift of the two clocks
(some parts per million) is followed. A mark is read against the anchor before it, which keeps the
elapsed time short: `elapsed_time` is a float32 of milliseconds, 60 ns fine at one second but 8 µs
at 100 s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

_ENVELOPE = 64


class Clock(Protocol):
    """What the recorder asks of a clock. `Any` marks are `int` (host) or `CudaMark`."""

    name: str
    immediate: bool
    """Whether a mark is its own time: nothing has to be read later."""

    @property
    def mark(self) -> Callable[..., Any]:
        """Call it to take a mark on the current stream or, on a device, on the stream given."""
        ...

    def current_stream(self) -> Any:
        """The stream that the host issues to at this moment; None on CPU."""
        ...

    def ready(self, mark: Any) -> bool:
        """Whether `read` can answer without waiting."""
        ...

    def read(self, mark: Any) -> int:
        """The mark's time, ns on the host's monotonic clock."""
        ...

    def host_now(self) -> int:
        """The host's monotonic clock, ns."""
        ...

    def advance(self) -> None:
        """Note the end of a step: the clock re-anchors itself."""
        ...

    def settle(self) -> None:
        """Wait for everything that was marked; only at the end of a recording."""
        ...

    @property
    def uncertainty_ns(self) -> int:
        """How far a read time may lie from the host clock."""
        ...


class HostClock:
    """The main thread's own clock: for CPU runs, where a call returns when its work is done."""

    name = "host"
    immediate = True
    uncertainty_ns = 0
    mark = staticmethod(time.perf_counter_ns)

    def current_stream(self) -> None:
        """There are no streams on CPU."""
        return

    def ready(self, mark: int) -> bool:
        """Always."""
        return True

    def read(self, mark: int) -> int:
        """The mark itself."""
        return mark

    def host_now(self) -> int:
        """Now, ns."""
        return time.perf_counter_ns()

    def advance(self) -> None:
        """Nothing to anchor."""

    def settle(self) -> None:
        """Nothing is pending."""


class EventBackend(Protocol):
    """The part of a device's API that `CudaClock` uses; tests replay known schedules through it."""

    def new_event(self) -> Any:
        """A timing event."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """Enqueue the event on the stream."""
        ...

    def query(self, event: Any) -> bool:
        """Whether the event has completed."""
        ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Device time from one completed event to another."""
        ...

    def synchronize(self, event: Any) -> None:
        """Wait until the event has completed."""
        ...

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        ...

    def new_stream(self) -> Any:
        """A stream that nobody else uses."""
        ...

    def host_ns(self) -> int:
        """The host's monotonic clock."""
        ...


class TorchCudaBackend:
    """`EventBackend` on `torch.cuda`."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device

    def new_event(self) -> Any:
        """A `torch.cuda.Event` with timing."""
        return self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self, event: Any, stream: Any) -> None:
        """`cudaEventRecord`."""
        event.record(stream)

    def query(self, event: Any) -> bool:
        """`cudaEventQuery`."""
        return bool(event.query())

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """`cudaEventElapsedTime`."""
        return float(start.elapsed_time(end))

    def synchronize(self, event: Any) -> None:
        """`cudaEventSynchronize`."""
        event.synchronize()

    def current_stream(self) -> Any:
        """`torch.cuda.current_stream` of the recorder's device."""
        return self._cuda.current_stream(self._device)

    def new_stream(self) -> Any:
        """A stream from torch's pool, of normal priority."""
        return self._cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def host_ns(self) -> int:
        """`time.perf_counter_ns`."""
        return time.perf_counter_ns()


class _Anchor:
    """An event on the idle stream, and what it says about the two clocks."""

    __slots__ = ("device_ns", "event", "host_ns", "previous")

    def __init__(self, event: Any, host_ns: int, previous: _Anchor | None) -> None:
        self.event = event
        self.host_ns = host_ns
        """Host time just before the event was recorded."""
        self.previous = previous
        self.device_ns: int | None = None
        """Device time since the first anchor, once known."""


class CudaMark:
    """An event on a stream, the anchor before it, and its time once it was read."""

    __slots__ = ("anchor", "event", "host_ns", "read_ns")

    def __init__(self, event: Any, host_ns: int, anchor: _Anchor) -> None:
        self.event = event
        self.host_ns = host_ns
        self.anchor: _Anchor | None = anchor
        self.read_ns: int | None = None


class CudaClock:
    """Marks are pooled CUDA events; see [Note: Device time on the host clock]."""

    name = "cuda_event"
    immediate = False

    def __init__(self, backend: EventBackend) -> None:
        self._backend = backend
        self._pool: list[Any] = []
        self._idle_stream = backend.new_stream()
        self._offsets: deque[tuple[int, int]] = deque(maxlen=_ENVELOPE)
        first = _Anchor(backend.new_event(), backend.host_ns(), None)
        backend.record(first.event, self._idle_stream)
        backend.synchronize(first.event)
        self._attach_ns = backend.host_ns() - first.host_ns
        first.device_ns = 0
        self._anchor = first
        self._offsets.append((first.host_ns, 0))

    def mark(self, stream: Any = None) -> CudaMark:
        """Record a pooled event on the stream; None: the current one."""
        backend = self._backend
        event = self._pool.pop() if self._pool else backend.new_event()
        backend.record(event, backend.current_stream() if stream is None else stream)
        return CudaMark(event, backend.host_ns(), self._anchor)

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        return self._backend.current_stream()

    def ready(self, mark: CudaMark) -> bool:
        """Whether the mark's event, and the anchor it is read against, have completed."""
        if mark.read_ns is not None:
            return True
        anchor = mark.anchor
        assert anchor is not None
        anchored = anchor.device_ns is not None or self._backend.query(anchor.event)
        return anchored and self._backend.query(mark.event)

    def read(self, mark: CudaMark) -> int:
        """The mark's time; its event goes back to the pool on the first call."""
        if mark.read_ns is None:
            anchor = mark.anchor
            assert anchor is not None
            device_ns = self._device_ns(anchor)
            device_ns += round(self._backend.elapsed_ms(anchor.event, mark.event) * 1e6)
            mark.read_ns = device_ns + self._offset_ns()
            self._pool.append(mark.event)
            mark.event = mark.anchor = None
        return mark.read_ns

    def host_now(self) -> int:
        """The host's clock, without touching a stream."""
        return self._backend.host_ns()

    def advance(self) -> None:
        """Record the next anchor on the idle stream; the one before becomes readable."""
        anchor = _Anchor(self._backend.new_event(), self._backend.host_ns(), self._anchor)
        self._backend.record(anchor.event, self._idle_stream)
        self._anchor = anchor

    def settle(self) -> None:
        """Wait for the device to have passed everything that was marked."""
        mark = self.mark()
        self._backend.synchronize(mark.event)

    @property
    def uncertainty_ns(self) -> int:
        """Round trip of the first anchor: up to drift, the offset cannot be off by more."""
        return self._attach_ns

    def _offset_ns(self) -> int:
        return max(host_ns - device_ns for host_ns, device_ns in self._offsets)

    def _device_ns(self, anchor: _Anchor) -> int:
        """Device time of an anchor since the first one; anchors before it get theirs on the way."""
        unknown = []
        while anchor.device_ns is None:
            unknown.append(anchor)
            assert anchor.previous is not None
            anchor = anchor.previous
        for later in reversed(unknown):
            assert later.previous is not None
            assert later.previous.device_ns is not None
            elapsed = self._backend.elapsed_ms(later.previous.event, later.event)
            later.device_ns = later.previous.device_ns + round(elapsed * 1e6)
            later.previous = None
            self._offsets.append((later.host_ns, later.device_ns))
            anchor = later
        assert anchor.device_ns is not None
        return anchor.device_ns
