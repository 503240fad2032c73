"""Take marks on the host clock (CPU) or on device streams (CUDA) and read them as times.

A mark is taken now, cheaply, and read later as nanoseconds on the host's monotonic clock
(`time.perf_counter_ns`). On CPU a mark is the time itself. On CUDA a mark is an event recorded on
a stream. The recorder reads it a step or more later, when the event has completed. Nothing here
synchronises after attach.

[Note: Device time on the host clock]
An event on the compute stream is not a usable reference, because it runs late by the lead of the
host. The reference is an event on an otherwise idle stream: one at attach (synchronised once), and
one more at each step (`CudaClock.advance`). Each such *anchor* bounds the offset between the two
clocks from both sides. An event cannot run before the host records it, and it has run when a query
reports it complete:

    host time before record - device time  <=  offset  <=  host time after the query - device time

The clock keeps the best bound of each side. A bound loosens with time by `_DRIFT_RATIO`, the
largest assumed difference in rate between the two clocks. The lower bound is the estimate, because
an idle stream runs an event within microseconds. The distance between the bounds is the current
uncertainty. It grows if the idle stream shares its hardware queue with a busy stream
(`CUDA_DEVICE_MAX_CONNECTIONS=1`), because each anchor then runs late.

A mark is read against the anchor before it, which keeps the elapsed time short: `elapsed_time` is
a float32 of milliseconds, exact to 60 ns at one second but to 8 µs at 100 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

_DRIFT_RATIO = 20e-6
"""Largest difference in rate between the clocks of host and device. Quartz oscillators are
specified to tens of parts per million."""
_PRIORITY_OF_FSDP = -1
"""torch 2.13, `FSDPCommContext.lazy_init`: the priority of its all-gather and reduce streams."""
_PAUSE_S = 0.0005
"""Time between two queries of events that have not completed, at the end of a recording."""


class Clock(Protocol):
    """The clock interface of the recorder. `Any` marks are `int` (host) or `CudaMark`."""

    name: str
    immediate: bool
    """Whether a mark is the time itself, so that nothing is read later."""

    @property
    def mark(self) -> Callable[..., Any]:
        """Take a mark on the current stream or, on a device, on the given stream."""
        ...

    def current_stream(self) -> Any:
        """The stream that the host issues to at this moment; None on CPU."""
        ...

    def ready(self, mark: Any) -> bool:
        """Whether `read` returns without waiting."""
        ...

    def read(self, mark: Any) -> int:
        """The mark's time, ns on the host's monotonic clock."""
        ...

    def host_now(self) -> int:
        """The host's monotonic clock, ns."""
        ...

    def advance(self) -> None:
        """End a step: the clock takes a new anchor."""
        ...

    def release(self, mark: Any) -> None:
        """Drop a mark that is never read."""
        ...

    def pause(self) -> None:
        """Sleep while the device continues; only at the end of a recording."""
        ...

    @property
    def uncertainty_ns(self) -> int:
        """Largest error of a time that is read now, relative to the host clock."""
        ...


class HostClock:
    """The clock of the main thread, for CPU runs: a call returns when its work is done."""

    name = "host"
    immediate = True
    uncertainty_ns = 0
    mark = host_now = staticmethod(time.perf_counter_ns)

    def current_stream(self) -> None:
        """Return None, because a CPU has no streams."""
        return

    def ready(self, mark: int) -> bool:
        """Always true."""
        return True

    def read(self, mark: int) -> int:
        """Return the mark itself."""
        return mark

    def advance(self) -> None:
        """Do nothing, because the host clock needs no anchor."""

    def release(self, mark: int) -> None:
        """Do nothing, because a number needs no release."""

    def pause(self) -> None:
        """Sleep for half a millisecond."""
        time.sleep(_PAUSE_S)


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
        """A new stream that no other code uses."""
        ...

    def host_ns(self) -> int:
        """The host's monotonic clock."""
        ...

    def pause(self, seconds: float) -> None:
        """Block the host while the device continues."""
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
        """Call `cudaEventRecord`."""
        event.record(stream)

    def query(self, event: Any) -> bool:
        """Call `cudaEventQuery`."""
        return bool(event.query())

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Call `cudaEventElapsedTime`."""
        return float(start.elapsed_time(end))

    def synchronize(self, event: Any) -> None:
        """Call `cudaEventSynchronize`."""
        event.synchronize()

    def current_stream(self) -> Any:
        """The result of `torch.cuda.current_stream` for the recorder's device."""
        return self._cuda.current_stream(self._device)

    def new_stream(self) -> Any:
        """A stream from torch's pool of the highest priority.

        torch hands out the 32 streams of a priority in turn, and FSDP2 takes one of normal and four
        of the next priority for each root: the 33rd request returns a stream that is in use. A
        device with two priorities has no other pool. A stream that is shared runs its anchors late,
        which `CudaClock.uncertainty_ns` shows.
        """
        stream: Any = self._cuda.Stream
        _, highest = stream.priority_range()
        return stream(self._device, priority=highest if highest < _PRIORITY_OF_FSDP else 0)

    def host_ns(self) -> int:
        """The result of `time.perf_counter_ns`."""
        return time.perf_counter_ns()

    def pause(self, seconds: float) -> None:
        """Call `time.sleep`."""
        time.sleep(seconds)


class _Anchor:
    """An event on the idle stream that ties device time to host time."""

    __slots__ = ("device_ns", "event", "host_ns", "is_followed", "num_marks", "previous")

    def __init__(self, event: Any, host_ns: int, previous: _Anchor | None) -> None:
        self.event = event
        self.host_ns = host_ns
        """Host time just before the event was recorded."""
        self.previous = previous
        self.device_ns: int | None = None
        """Device time since the first anchor, once known."""
        self.num_marks = 0
        """Number of unread marks that refer to this anchor."""
        self.is_followed = False
        """Whether the next anchor's device time, which is relative to this anchor, is known."""


class CudaMark:
    """An event on a stream, the anchor before it, and its time once read."""

    __slots__ = ("anchor", "event", "host_ns", "read_ns")

    def __init__(self, event: Any, host_ns: int, anchor: _Anchor) -> None:
        self.event = event
        self.host_ns = host_ns
        self.anchor: _Anchor | None = anchor
        self.read_ns: int | None = None
        anchor.num_marks += 1


class CudaClock:
    """The clock of CUDA events, which are pooled; see [Note: Device time on the host clock]."""

    name = "cuda_event"
    immediate = False

    def __init__(self, backend: EventBackend) -> None:
        self._backend = backend
        self._pool: list[Any] = []
        self._idle_stream = backend.new_stream()
        first = _Anchor(backend.new_event(), backend.host_ns(), None)
        backend.record(first.event, self._idle_stream)
        backend.synchronize(first.event)
        first.device_ns = 0
        self._anchor = first
        self._unseen: _Anchor | None = None
        """The newest anchor, until a query reports it complete."""
        self._lower_ns, self._lower_at_ns = first.host_ns, first.host_ns
        """The lower bound of the offset, and the host time at which it held."""
        self._upper_ns = self._upper_at_ns = backend.host_ns()
        """The upper bound of the offset, and the host time at which it held."""

    def mark(self, stream: Any = None) -> CudaMark:
        """Record a pooled event on the stream; None means the current stream."""
        backend = self._backend
        event = self._new_event()
        # Before the call: the thread can lose its core after it, and a mark runs at once then.
        host_ns = backend.host_ns()
        backend.record(event, backend.current_stream() if stream is None else stream)
        if self._unseen is not None:
            self._look_for_anchor()
        return CudaMark(event, host_ns, self._anchor)

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        return self._backend.current_stream()

    def ready(self, mark: CudaMark) -> bool:
        """Whether the mark's event, and the anchor it is read against, have completed.

        Another thread may read or release the mark meanwhile, which takes its event and anchor.
        """
        event, anchor = mark.event, mark.anchor
        if event is None or anchor is None:
            return True
        anchor_event = anchor.event
        is_anchored = anchor.device_ns is not None or (
            anchor_event is not None and self._backend.query(anchor_event)
        )
        return is_anchored and self._backend.query(event)

    def read(self, mark: CudaMark) -> int:
        """The mark's time; the first call returns its event to the pool."""
        if mark.read_ns is None:
            anchor = mark.anchor
            assert anchor is not None
            device_ns = self._device_ns(anchor)
            device_ns += round(self._backend.elapsed_ms(anchor.event, mark.event) * 1e6)
            mark.read_ns = device_ns + self._lower_ns
            self.release(mark)
        return mark.read_ns

    def release(self, mark: CudaMark) -> None:
        """Return a mark's event to the pool; a second call does nothing."""
        anchor, event = mark.anchor, mark.event
        mark.event = mark.anchor = None
        if anchor is None:
            return
        self._pool.append(event)
        anchor.num_marks -= 1
        self._recycle(anchor)

    def host_now(self) -> int:
        """The host's clock, without touching a stream."""
        return self._backend.host_ns()

    def advance(self) -> None:
        """Record the next anchor on the idle stream; the previous anchor becomes readable."""
        anchor = _Anchor(self._new_event(), self._backend.host_ns(), self._anchor)
        self._backend.record(anchor.event, self._idle_stream)
        self._anchor = self._unseen = anchor

    def pause(self) -> None:
        """Block the host for half a millisecond."""
        self._backend.pause(_PAUSE_S)

    @property
    def uncertainty_ns(self) -> int:
        """The current distance between the two bounds of the offset."""
        now = self._backend.host_ns()
        loosened = (now - self._lower_at_ns) + (now - self._upper_at_ns)
        width = self._upper_ns - self._lower_ns + round(loosened * _DRIFT_RATIO)
        return max(width, 0)

    def _new_event(self) -> Any:
        # One call either takes an event or raises, because other threads use the pool too.
        try:
            return self._pool.pop()
        except IndexError:
            return self._backend.new_event()

    def _look_for_anchor(self) -> None:
        """Bound the offset from above once a query reports the newest anchor complete."""
        anchor = self._unseen
        if anchor is None or not self._backend.query(anchor.event):
            return
        now = self._backend.host_ns()
        self._unseen = None
        bound = now - self._device_ns(anchor)
        loosened = self._upper_ns + round((now - self._upper_at_ns) * _DRIFT_RATIO)
        self._upper_ns, self._upper_at_ns = min(bound, loosened), now

    def _tighten_lower(self, anchor: _Anchor, device_ns: int) -> None:
        """Use an anchor's bound unless an earlier bound is tighter even after the drift."""
        bound = anchor.host_ns - device_ns
        loosened = self._lower_ns - round((anchor.host_ns - self._lower_at_ns) * _DRIFT_RATIO)
        self._lower_ns, self._lower_at_ns = max(bound, loosened), anchor.host_ns

    def _device_ns(self, anchor: _Anchor) -> int:
        """Device time of an anchor since the first one; also reads the anchors before it."""
        unknown = []
        while anchor.device_ns is None:
            unknown.append(anchor)
            assert anchor.previous is not None
            anchor = anchor.previous
        for later in reversed(unknown):
            earlier = later.previous
            assert earlier is not None
            assert earlier.device_ns is not None
            elapsed = self._backend.elapsed_ms(earlier.event, later.event)
            later.device_ns = earlier.device_ns + round(elapsed * 1e6)
            later.previous = None
            earlier.is_followed = True
            self._recycle(earlier)
            self._tighten_lower(later, later.device_ns)
            anchor = later
        assert anchor.device_ns is not None
        return anchor.device_ns

    def _recycle(self, anchor: _Anchor) -> None:
        """Return an anchor's event to the pool once no mark refers to it."""
        if anchor.is_followed and anchor.num_marks == 0 and anchor.event is not None:
            self._pool.append(anchor.event)
            anchor.event = None
