"""Count the requests and bytes that were downloaded."""

import threading


class Downloads:
    """The requests and bytes of this process; thread-safe."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_requests = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count a request with this many bytes of content."""
        with self._lock:
            self.num_requests += 1
            self.num_bytes += num_bytes


DOWNLOADS = Downloads()
"""The downloads of this process."""
