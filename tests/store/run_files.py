"""Make runs by hand on a real disk: manifests, records, rows, and writers."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.streams import Row
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.run import ClockPair, ModelInfo, RankRecord, RunManifest, Unit
from fsdp_inspect.trace.tables import EventTable, MemoryTable, Table

STEP_NS = 1000
EVENTS_PER_STEP = 4


def make_unit(index: int, fqn: str, **changes: Any) -> Unit:
    known = {
        "index": index,
        "fqn": fqn,
        "modules": [fqn],
        "num_parameters": 100,
        "num_trainable_parameters": 100,
        "unsharded_bytes": 400,
        "sharded_bytes": 200,
        "reduce_bytes": 400,
        "param_dtype": "float32",
        "reduce_dtype": "float32",
        "reshard_after_forward": True,
    }
    return Unit(**{**known, **changes})


def make_manifest(**changes: Any) -> RunManifest:
    known = {
        "run_id": "run",
        "created": "2026-01-01T00:00:00+00:00",
        "created_unix_ns": 1_767_225_600_000_000_000,
        "world_size": 2,
        "backend": "gloo",
        "device_type": "cpu",
        "model": ModelInfo(class_name="Decoder", num_parameters=200),
        "units": [make_unit(0, ""), make_unit(1, "layers.0")],
    }
    return RunManifest(**{**known, **changes})


def read_clocks() -> ClockPair:
    """Both clocks at one moment: the closest of several readings, because a process may stand."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    before, unix_ns, _ = min(readings, key=lambda reading: reading[2] - reading[0])
    return ClockPair(monotonic_ns=before, unix_ns=unix_ns, uncertainty_ns=100)


def make_record(rank: int = 0, **changes: Any) -> RankRecord:
    known = {
        "rank": rank,
        "world_size": 2,
        "run_id": make_manifest().run_id,
        "run_created_unix_ns": make_manifest().created_unix_ns,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": "cpu",
        "clock_start": read_clocks(),
    }
    return RankRecord(**{**known, **changes})


def event_row(number: int, **columns: int) -> Row:
    """Event `number` of a run of equal steps: all-gather, forward, optimizer, step."""
    step, place = divmod(number, EVENTS_PER_STEP)
    start = step * STEP_NS
    kind, phase, unit, begin, end, need = (
        (EventKind.ALL_GATHER, Phase.FORWARD, 1, 0, 300, 100),
        (EventKind.FORWARD, Phase.FORWARD, 1, 300, 700, -1),
        (EventKind.OPTIMIZER, Phase.OPTIMIZER, -1, 700, 900, -1),
        (EventKind.STEP, Phase.OUTSIDE, -1, 0, 1000, -1),
    )[place]
    is_collective = kind is EventKind.ALL_GATHER
    known: dict[str, int] = {
        **dict.fromkeys(EventTable.DTYPES, 0),
        "step": step,
        "phase": phase,
        "kind": kind,
        "unit": unit,
        "issued_by": unit,
        "group": 0 if is_collective else -1,
        "sequence": step if is_collective else -1,
        "collective": step if is_collective else -1,
        "bytes": 400 if is_collective else -1,
        "issue_ns": start + begin,
        "start_ns": start + begin,
        "end_ns": start + end,
        "need_ns": start + need if need >= 0 else -1,
    }
    return tuple({**known, **columns}.values())


def event_rows(num_steps: int) -> list[Row]:
    return [event_row(number) for number in range(num_steps * EVENTS_PER_STEP)]


def memory_row(number: int) -> Row:
    known = {**dict.fromkeys(MemoryTable.DTYPES, -1), "step": number, "time_ns": number}
    return tuple({**known, "phase": 0, "method": 0, "allocated": 1000 + number}.values())


def scalar_row(number: int) -> Row:
    return (number, 0, number, 4.0 - number / 8)


def table_of(kind: type[Table], rows: Sequence[Row]) -> Table:
    """The table of these rows."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in kind.DTYPES)
    return kind.from_columns(
        {
            name: np.array(list(values), dtype=dtype)
            for (name, dtype), values in zip(kind.DTYPES.items(), columns, strict=True)
        }
    )


def sorted_by(table: Table, column: str) -> Table:
    return table.where(np.argsort(getattr(table, column), kind="stable"))


def assert_same_rows(found: Table, expected: Table) -> None:
    """Check that tables are equal to the last bit, including NaN, order and types."""
    assert type(found) is type(expected)
    for name, values in expected.columns().items():
        column = found.columns()[name]
        assert column.dtype == values.dtype, name
        assert column.tobytes() == values.tobytes(), name


def write_rank(path: Path, rank: int = 0, *, num_steps: int = 3, **changes: Any) -> RankWriter:
    """Write a rank with events, memory and scalars, flushed and still open."""
    writer = RankWriter(path, make_record(rank, **changes))
    writer.events.extend(event_rows(num_steps))
    writer.memory.extend(memory_row(number) for number in range(num_steps))
    writer.scalars.extend(scalar_row(number) for number in range(num_steps))
    writer.flush()
    return writer


def write_run(
    path: Path, *, ranks: Sequence[int] = (0, 1), num_steps: int = 3, compact: bool = True
) -> Path:
    """Write a run that ended normally, with compacted streams or not."""
    attempt = create_run(path, make_manifest())
    for rank in ranks:
        write_rank(path, rank, num_steps=num_steps, attempt=attempt).close(compact=compact)
    return path
