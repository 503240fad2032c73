"""Simulate one rank's host, streams and communicators in virtual time (ns).

Two execution models share one interface:

- `StreamMachine` (CUDA): the host issues work and runs ahead. Each stream runs its work in order.
  An event is the moment at which a stream has run everything before it.
- `HostMachine` (CPU): every stream is the main thread, so work runs when it is issued. Only
  collectives run in parallel, unless the backend is synchronous.

Collectives of one communicator run one at a time, in the order of issue.
"""


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


class Machine:
    """A rank for the schedule: its host, and the streams on which the host puts work."""

    __slots__ = (
        "_blocks",
        "all_reduce",
        "compute",
        "copy_in",
        "gather",
        "host",
        "reduce",
    )

    def __init__(self, *, has_streams: bool, is_blocking: bool) -> None:
        """Start all clocks at 0.

        Args:
            has_streams: The host runs ahead of streams. Else every stream is the host's thread.
            is_blocking: A synchronous collective blocks its stream until it ends.
        """
        self.host = VirtualStream()
        self._blocks = is_blocking
        self.compute, self.copy_in, self.gather, self.reduce, self.all_reduce = (
            VirtualStream() if has_streams else self.host for _ in range(5)
        )

    def launch(self, duration_ns: int) -> None:
        """Keep the host busy with issuing work."""
        self.host.free_ns += duration_ns

    def hold_back(self, ahead_ns: int) -> None:
        """Let the host wait until its lead over the compute stream is at most `ahead_ns`."""
        self.host.free_ns = max(self.host.free_ns, self.compute.free_ns - ahead_ns)

    def run(self, stream: VirtualStream, duration_ns: int, launch_ns: int = 0) -> tuple[int, int]:
        """Put work on a stream. Issuing takes `launch_ns` of the host. Returns start and end.

        [Note: launching] A piece is many kernels, and the first ones run while others are issued.
        The piece starts when the host begins to issue it, and ends after the host has issued all.
        On the host's thread, issuing is part of the work.
        """
        host = self.host
        start = stream.free_ns
        if stream is host:
            host.free_ns = end = start + duration_ns
            return start, end
        if start < host.free_ns:
            start = host.free_ns
        end = start + duration_ns
        if launch_ns:
            host.free_ns += launch_ns
        if end < host.free_ns:
            end = host.free_ns
        stream.free_ns = end
        return start, end

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
        if self._blocks and not is_async:
            stream.free_ns = end
        return start, end

    def wait(self, stream: VirtualStream, event_ns: int) -> None:
        """Delay work that is put on the stream from now on until the event."""
        if event_ns > stream.free_ns:
            stream.free_ns = event_ns

    def reached(self, stream: VirtualStream) -> int:
        """The end of all work on the stream so far: the time of an event recorded now."""
        own, host = stream.free_ns, self.host.free_ns
        return own if own > host else host


class StreamMachine(Machine):
    """A device with streams, driven by a host that runs ahead."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(has_streams=True, is_blocking=True)


class HostMachine(Machine):
    """A CPU: one thread runs everything but the collectives."""

    __slots__ = ()

    def __init__(self, *, is_blocking: bool) -> None:
        """Start the thread at time 0.

        Args:
            is_blocking: The backend's collectives block the thread until they end (gloo). Else they
                run in parallel until their result is needed (an emulated link).
        """
        super().__init__(has_streams=False, is_blocking=is_blocking)
