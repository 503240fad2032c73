"""How does freed memory go back to the system? The C library keeps it in the midst of its heap.

A trace is read in thousands of small arrays, which are joined into a few large ones: what the small
ones leave behind fits none of the large ones, and would count beside them until the process ends.
"""

import ctypes
import sys


def return_freed_memory() -> None:
    """Give the heap's free pages back; does nothing where the C library cannot (not glibc)."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
