"""Return freed memory to the operating system, because the C library keeps it in its heap.

A trace is read as thousands of small arrays, which are joined to a few large arrays. The freed
memory of the small arrays cannot hold the large ones. Without this, the process would keep both.
"""

import ctypes
import sys


def return_freed_memory() -> None:
    """Return the heap's free pages; does nothing with C libraries other than glibc."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
