"""Count the bytes that were downloaded, so that a command can show progress."""

import threading
from collections.abc import Callable


class Downloads:
    """The requests and bytes of this process; thread-safe."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_requests = 0
        self.on_change: Callable[[], None] | None = None
        """Called after each download, from any thread."""
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count a request with this many bytes of content."""
        with self._lock:
            self.num_requests += 1
            self.num_bytes += num_bytes
        if self.on_change is not None:
            self.on_change()


DOWNLOADS = Downloads()
"""The downloads of this process."""
