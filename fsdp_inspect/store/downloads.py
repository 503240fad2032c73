"""Count the requests to URLs: those that run, and the bytes that were downloaded."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Downloads:
    """The requests and bytes of this process; thread-safe."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_requests = 0
        self.on_wait: Callable[[bool], object] = lambda is_waiting: None
        """Called with True when a request begins and none runs, and with False when none is left.

        No request begins or ends during the call.
        """
        self._num_running = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count a request with this many bytes of content."""
        with self._lock:
            self.num_requests += 1
            self.num_bytes += num_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a running request."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            was_running = self._num_running > 0
            self._num_running += change
            if was_running != (self._num_running > 0):
                self.on_wait(not was_running)


DOWNLOADS = Downloads()
"""The downloads of this process."""
