"""Faults of a Dask worker, loaded with its option `--preload`.

The folder in `FSDP_INSPECT_TEST_FAULTS` holds the orders: `hold` (the name of the trace at which a
task waits until `released` exists), `hold-writing` (a part of the path of a table, in the middle of
which a task waits), `die` (the name of the trace at which the worker is killed), and `fill` (the
name of the trace at which the worker uses up its memory).
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from fsdp_inspect.importing import trace_part
from fsdp_inspect.store import compaction
from fsdp_inspect.store.records import unfinished_path

ORDERS = Path(os.environ["FSDP_INSPECT_TEST_FAULTS"])
_read_trace = getattr(trace_part.read_trace, "original", trace_part.read_trace)
_write_compacted = getattr(compaction.write_compacted, "original", compaction.write_compacted)


def read_trace(file: Path, *rest: Any) -> Any:
    if _is_ordered("die", file):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_ordered("fill", file):
        blocks = []
        while True:  # the nanny ends this process at its memory limit
            blocks.append(b"x" * (32 << 20))
            time.sleep(0.05)
    if _is_ordered("hold", file):
        _wait()
    return _read_trace(file, *rest)


def write_compacted(path: Path, *rest: Any, **options: Any) -> None:
    if _is_ordered("hold-writing", path) and not (ORDERS / "released").exists():
        unfinished_path(path).write_bytes(b"half")
        _wait()
    _write_compacted(path, *rest, **options)


def _wait() -> None:
    while not (ORDERS / "released").exists():
        (ORDERS / f"held-{os.getpid()}").touch()
        time.sleep(0.05)


def _is_ordered(order: str, file: Path) -> bool:
    named = ORDERS / order
    return named.exists() and named.read_text() in str(Path(file.parent.name, file.name))


read_trace.original = _read_trace  # Dask may load this file twice
trace_part.read_trace = read_trace
write_compacted.original = _write_compacted
compaction.write_compacted = write_compacted
