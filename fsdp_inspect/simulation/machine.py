"""When does work run that is put on streams? One rank's host, streams and communicators, in ns.

Two execution models share one interface:

- `StreamMachine` (CUDA): the host issues work and runs ahead; each stream runs its work in order;
  an event is the moment at which a stream has run everything before it.
- `HostMachine` (CPU): every stream is the main thread, so work happens when it is issued;
  collectives alone run beside it, unless the backend is synchronous.

Collectives of one communicator run one at a time, in the order of issue.
"""

from abc import ABC, abstractmethod


class VirtualStream:
    """A queue of work; `free_ns` is when all of it has run."""

    __slots__ = ("free_ns",)

    def __init__(self) -> None:
        self.free_ns = 0


class Communicator:
    """What runs the collectives of one process group, one after the other."""

    __slots__ = ("free_ns",)

    def __init__(self) -> None:
        self.free_ns = 0


class Machine(ABC):
    """What the schedule needs of a rank."""

    compute: VirtualStream
    copy_in: VirtualStream
    gather: VirtualStream
    reduce: VirtualStream
    all_reduce: VirtualStream

    @property
    @abstractmethod
    def host_ns(self) -> int:
        """The host's clock."""

    @abstractmethod
    def launch(self, duration_ns: int) -> None:
        """The host is busy issuing."""

    @abstractmethod
    def run(self, stream: VirtualStream, duration_ns: int, launch_ns: int = 0) -> tuple[int, int]:
        """Put work on a stream, whose issuing takes the host a time; returns its start and end."""

    @abstractmethod
    def hold_back(self, ahead_ns: int) -> None:
        """The host waits until it is no further ahead of the compute stream than that."""

    def holds(self, *, is_async: bool) -> bool:
        """Whether a collective keeps the stream that it is put on until its end."""
        return not is_async

    def transfer(
        self,
        stream: VirtualStream,
        communicator: Communicator,
        duration_ns: int,
        *,
        is_async: bool = False,
        not_before_ns: int = 0,
    ) -> tuple[int, int]:
        """Put a collective on a stream; returns its start and end.

        It runs behind the stream's work and behind the communicator's collectives. One that does
        not hold the stream is waited for by whoever needs it.
        """
        start = max(self.reached(stream), communicator.free_ns, not_before_ns)
        communicator.free_ns = end = start + duration_ns
        if self.holds(is_async=is_async):
            stream.free_ns = end
        return start, end

    def wait(self, stream: VirtualStream, event_ns: int) -> None:
        """Nothing put on the stream from now on runs before the event."""
        if event_ns > stream.free_ns:
            stream.free_ns = event_ns

    def reached(self, stream: VirtualStream) -> int:
        """When the stream has run everything that is on it: an event recorded now."""
        return max(stream.free_ns, self.host_ns)


class StreamMachine(Machine):
    """A device with streams, driven by a host that runs ahead."""

    def __init__(self) -> None:
        self._host_ns = 0
        self.compute, self.copy_in, self.gather = VirtualStream(), VirtualStream(), VirtualStream()
        self.reduce, self.all_reduce = VirtualStream(), VirtualStream()

    @property
    def host_ns(self) -> int:
        """The host's clock."""
        return self._host_ns

    def launch(self, duration_ns: int) -> None:
        """The host is busy issuing."""
        self._host_ns += duration_ns

    def hold_back(self, ahead_ns: int) -> None:
        """The host waits until it is no further ahead of the compute stream than that."""
        self._host_ns = max(self._host_ns, self.compute.free_ns - ahead_ns)

    def run(self, stream: VirtualStream, duration_ns: int, launch_ns: int = 0) -> tuple[int, int]:
        """Work starts once its first kernel is issued, and cannot end before its last one is.

        [Note: launching] A piece is many kernels, issued one by one while the first ones run. It
        starts when the host begins to issue it, and ends no earlier than the host has issued all.
        """
        start = self.reached(stream)
        self._host_ns += launch_ns
        stream.free_ns = max(start + duration_ns, self._host_ns)
        return start, stream.free_ns


class HostMachine(Machine):
    """A CPU: one thread does everything but the collectives."""

    def __init__(self, *, is_blocking: bool) -> None:
        """A thread at time 0.

        Args:
            is_blocking: The backend's collectives hold the thread until they end (gloo); else
                they run beside it until somebody needs them (an emulated link).
        """
        self._thread = VirtualStream()
        self._is_blocking = is_blocking
        self.compute = self.copy_in = self.gather = self.reduce = self.all_reduce = self._thread

    @property
    def host_ns(self) -> int:
        """The thread's clock."""
        return self._thread.free_ns

    def launch(self, duration_ns: int) -> None:
        """The thread is busy."""
        self._thread.free_ns += duration_ns

    def hold_back(self, ahead_ns: int) -> None:
        """The thread is never ahead of itself."""

    def run(self, stream: VirtualStream, duration_ns: int, launch_ns: int = 0) -> tuple[int, int]:
        """Work happens now; issuing it is part of it."""
        start = stream.free_ns
        stream.free_ns = start + duration_ns
        return start, stream.free_ns

    def holds(self, *, is_async: bool) -> bool:
        """A blocking backend's synchronous collectives hold the thread."""
        return self._is_blocking and not is_async
