"""Faults of a Dask worker, loaded with its option `--preload`.

The folder in `FSDP_INSPECT_TEST_FAULTS` holds the orders: `hold` (a part of the name of the task
that waits until `released` exists), `hold-writing` (a part of the path of a table, in the middle of
which a task waits), `die` (a part of the name of the task whose worker is killed), and `fill` (a
part of the name of the task that uses up the memory of its worker). A task that reads a trace has
the name of its file, and a task that simulates plans is named by their numbers.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from fsdp_inspect.advice import plan_simulator
from fsdp_inspect.importing import trace_part
from fsdp_inspect.store import compaction
from fsdp_inspect.writing import unfinished_path

ORDERS = Path(os.environ["FSDP_INSPECT_TEST_FAULTS"])
_read_trace = getattr(trace_part.read_trace, "original", trace_part.read_trace)
_score_plans = getattr(plan_simulator.score_plans, "original", plan_simulator.score_plans)
_write_compacted = getattr(compaction.write_compacted, "original", compaction.write_compacted)


def read_trace(file: Path, *rest: Any) -> Any:
    _obey(_name(file))
    return _read_trace(file, *rest)


def score_plans(asked: plan_simulator.PlansToScore) -> Any:
    _obey(str(asked))
    return _score_plans(asked)


def write_compacted(path: Path, *rest: Any, **options: Any) -> None:
    if _is_ordered("hold-writing", _name(path)) and not (ORDERS / "released").exists():
        unfinished_path(path).write_bytes(b"half")
        _wait()
    _write_compacted(path, *rest, **options)


def _obey(name: str) -> None:
    """Follow the orders for a task."""
    if _is_ordered("die", name):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_ordered("fill", name):
        blocks = []
        while True:  # the nanny ends this process at its memory limit
            blocks.append(b"x" * (32 << 20))
            time.sleep(0.05)
    if _is_ordered("hold", name):
        _wait()


def _wait() -> None:
    while not (ORDERS / "released").exists():
        (ORDERS / f"held-{os.getpid()}").touch()
        time.sleep(0.05)


def _name(file: Path) -> str:
    return str(Path(file.parent.name, file.name))


def _is_ordered(order: str, name: str) -> bool:
    named = ORDERS / order
    return named.exists() and named.read_text() in name


read_trace.original = _read_trace  # Dask may load this file twice
trace_part.read_trace = read_trace
score_plans.original = _score_plans
plan_simulator.score_plans = score_plans
write_compacted.original = _write_compacted
compaction.write_compacted = write_compacted
