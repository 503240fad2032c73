"""Read and write run folders. No other package accesses their files."""

import contextlib
import os
import sys

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
_POOL = "ARROW_DEFAULT_MEMORY_POOL"


def _load_arrow_in_little_space() -> None:
    """Reserve less if the address space is limited: `ulimit -v` would make a training fail.

    Arrow's pool reserves 1 GiB, and glibc's heap of each further thread 64 MiB.
    """
    import ctypes
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    with contextlib.suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    if "pyarrow" in sys.modules or _POOL in os.environ:
        return
    os.environ[_POOL] = "system"
    try:
        import pyarrow  # noqa: F401 - it reads the variable when it is loaded
    finally:
        del os.environ[_POOL]


with contextlib.suppress(ImportError):  # without `resource`, there is no such limit
    _load_arrow_in_little_space()
