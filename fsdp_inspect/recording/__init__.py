"""Record a run of any `fully_shard` model. Needs torch."""

import os
import resource
import sys

_POOL = "ARROW_DEFAULT_MEMORY_POOL"


def _load_arrow_in_little_space() -> None:
    """Load Arrow without its pool, which reserves 1 GiB, if the address space is limited.

    Under `ulimit -v`, this reservation would make the training fail.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    if "pyarrow" in sys.modules or _POOL in os.environ:
        return
    os.environ[_POOL] = "system"
    try:
        import pyarrow  # noqa: F401 - it reads the variable when it is loaded
    finally:
        del os.environ[_POOL]


_load_arrow_in_little_space()
