"""Handle a failing disk: schedule retries, and write without a free file descriptor."""

import errno
import os
import time
from collections.abc import Callable

LONGEST_RETRY_S = 4.0
"""The longest time between two attempts to write after a fault of the disk."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class RetryTimer:
    """The time of the next attempt: the interval doubles with each failed attempt."""

    def __init__(self, first_s: float) -> None:
        self._first_s = min(first_s, LONGEST_RETRY_S)
        self._wait_s = 0.0
        self._due_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether to write now; always true while the disk works."""
        return time.monotonic() >= self._due_s

    def note_attempt(self, *, failed: bool) -> None:
        """Set the time of the next attempt."""
        if failed:
            self._wait_s = min(max(2 * self._wait_s, self._first_s), LONGEST_RETRY_S)
            self._due_s = time.monotonic() + self._wait_s
        else:
            self._wait_s = self._due_s = 0.0


class SpareDescriptor:
    """An open file descriptor that is released when the process has no free descriptor."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def keep(self) -> None:
        """Open the descriptor if it is not open and the process has one left."""
        if self._descriptor is None:
            try:
                self._descriptor = os.open(os.devnull, os.O_RDONLY)
            except OSError:
                return

    def release(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def use_for(self, write: Callable[[], None]) -> None:
        """Call a function that opens one file at a time, and again with the spare descriptor.

        Raises:
            OSError: The function failed for another reason, or also with the spare descriptor.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR or self._descriptor is None:
                raise
            self.release()
            try:
                write()
            finally:
                self.keep()
