"""Simulate one rank's host, streams and communicators in virtual time (ns).

Two execution models share one interface:

- `StreamMachine` (CUDA): the host issues work and runs ahead. Each stream runs its work in order.
  An event is the moment at which a stream has run everything before it.
- `HostMachine` (CPU): every stream is the main thread, so work runs when it is issued. Only
  collectives run in parallel, unless the backend is synchronous.

Collectives of one communicator run one at a time, in the order of issue.
"""

from abc import ABC, abstractmethod


class VirtualStream:
    """A queue of work; `free_ns` is the end of its last work."""

    __slots__ = ("free_ns",)

    def __init__(self) -> None:
        self.free_ns = 0


class CollectiveQueue:
    """Runs the collectives of one process group one by one."""

    __slots__ = ("free_ns",)

    def __init__(self) -> None:
        self.free_ns = 0


class Machine(ABC):
    """The interface of a rank for the schedule."""

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
        """Keep the host busy with issuing work."""

    @abstractmethod
    def run(self, stream: VirtualStream, duration_ns: int, launch_ns: int = 0) -> tuple[int, int]:
        """Put work on a stream. Issuing takes `launch_ns` of the host. Returns start and end."""

    @abstractmethod
    def hold_back(self, ahead_ns: int) -> None:
        """Let the host wait until its lead over the compute stream is at most `ahead_ns`."""

    def holds(self, *, is_async: bool) -> bool:
        """Whether a collective blocks its stream until it ends."""
        return not is_async

    def transfer(
        self,
        stream: VirtualStream,
        communicator: CollectiveQueue,
        duration_ns: int,
        *,
        is_async: bool = False,
        not_before_ns: int = 0,
    ) -> tuple[int, int]:
        """Put a collective on a stream; returns its start and end.

        It runs after the stream's work and after the communicator's collectives. If it does not
        block the stream, the work that needs it waits for it.
        """
        start = max(self.reached(stream), communicator.free_ns, not_before_ns)
        communicator.free_ns = end = start + duration_ns
        if self.holds(is_async=is_async):
            stream.free_ns = end
        return start, end

    def wait(self, stream: VirtualStream, event_ns: int) -> None:
        """Delay work that is put on the stream from now on until the event."""
        if event_ns > stream.free_ns:
            stream.free_ns = event_ns

    def reached(self, stream: VirtualStream) -> int:
        """The end of all work on the stream so far: the time of an event recorded now."""
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
        """Keep the host busy with issuing work."""
        self._host_ns += duration_ns

    def hold_back(self, ahead_ns: int) -> None:
        """Let the host wait until its lead over the compute stream is at most `ahead_ns`."""
        self._host_ns = max(self._host_ns, self.compute.free_ns - ahead_ns)

    def run(self, stream: VirtualStream, duration_ns: int, launch_ns: int = 0) -> tuple[int, int]:
        """Work starts when its first kernel is issued, and ends after its last one is issued.

        [Note: launching] A piece is many kernels, and the first ones run while others are issued.
        The piece starts when the host begins to issue it, and ends after the host has issued all.
        """
        start = self.reached(stream)
        self._host_ns += launch_ns
        stream.free_ns = max(start + duration_ns, self._host_ns)
        return start, stream.free_ns


class HostMachine(Machine):
    """A CPU: one thread runs everything but the collectives."""

    def __init__(self, *, is_blocking: bool) -> None:
        """Start the thread at time 0.

        Args:
            is_blocking: The backend's collectives block the thread until they end (gloo). Else they
                run in parallel until their result is needed (an emulated link).
        """
        self._thread = VirtualStream()
        self._is_blocking = is_blocking
        self.compute = self.copy_in = self.gather = self.reduce = self.all_reduce = self._thread

    @property
    def host_ns(self) -> int:
        """The thread's clock."""
        return self._thread.free_ns

    def launch(self, duration_ns: int) -> None:
        """Keep the thread busy."""
        self._thread.free_ns += duration_ns

    def hold_back(self, ahead_ns: int) -> None:
        """Do nothing: the thread has no lead over itself."""

    def run(self, stream: VirtualStream, duration_ns: int, launch_ns: int = 0) -> tuple[int, int]:
        """Run the work now; issuing is part of it."""
        start = stream.free_ns
        stream.free_ns = start + duration_ns
        return start, stream.free_ns

    def holds(self, *, is_async: bool) -> bool:
        """Whether a collective blocks the thread: a blocking backend's synchronous ones do."""
        return self._is_blocking and not is_async
