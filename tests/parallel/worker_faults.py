"""Faults of a Dask worker, loaded with its option `--preload`.

The folder in `FSDP_INSPECT_TEST_FAULTS` holds the orders: `hold` (the name of the trace at which a
task waits until `released` exists), `die` (the name of the trace at which the worker is killed),
and `fill` (the name of the trace at which the worker uses up its memory).
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from fsdp_inspect.importing import trace_part

ORDERS = Path(os.environ["FSDP_INSPECT_TEST_FAULTS"])
_read_trace = getattr(trace_part.read_trace, "original", trace_part.read_trace)


def read_trace(file: Path, *rest: Any) -> Any:
    if _is_ordered("die", file):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_ordered("fill", file):
        blocks = []
        while True:  # the nanny ends this process at its memory limit
            blocks.append(b"x" * (32 << 20))
            time.sleep(0.05)
    if _is_ordered("hold", file) and not (ORDERS / "released").exists():
        (ORDERS / f"held-{os.getpid()}").touch()
        while not (ORDERS / "released").exists():
            time.sleep(0.05)
    return _read_trace(file, *rest)


def _is_ordered(order: str, file: Path) -> bool:
    named = ORDERS / order
    return named.exists() and named.read_text() in file.name


read_trace.original = _read_trace  # Dask may load this file twice
trace_part.read_trace = read_trace
