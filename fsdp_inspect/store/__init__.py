"""Read and write run folders. No other package accesses their files."""

import contextlib
import os
import sys

_POOL = "ARROW_DEFAULT_MEMORY_POOL"


def _load_arrow_in_little_space() -> None:
    """Load Arrow without its pool, which reserves 1 GiB, if the address space is limited.

    Under `ulimit -v`, this reservation would make a training fail.
    """
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    if "pyarrow" in sys.modules or _POOL in os.environ:
        return
    os.environ[_POOL] = "system"
    try:
        import pyarrow  # noqa: F401 - it reads the variable when it is loaded
    finally:
        del os.environ[_POOL]


with contextlib.suppress(ImportError):  # without `resource`, there is no such limit
    _load_arrow_in_little_space()
