"""Write a run folder of any size, for example of 1,000 GPUs, with the store.

Every rank gets its own recording: events as the recorder writes them on CUDA (13 per unit and
step), allocator samples at the unit boundaries, a loss, and the store's summary of them. One step
is made, and ranks and steps vary its times by seeded, deterministic noise. The files therefore
compress no better than those of a real recording.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.compacted import write_compacted
from fsdp_inspect.store.compaction import compact_rank, write_run_summary
from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.schema import EVENTS, MEMORY, RANK_FILE, SCALARS, TableFile, TableT
from fsdp_inspect.store.summary_files import read_rank_summary, write_rank_summary
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, MemoryPoint, Phase, Stream
from fsdp_inspect.trace.plan import Plan, UnitPlan
from fsdp_inspect.trace.run import (
    ClockPair,
    ModelInfo,
    ProcessGroup,
    RankRecord,
    RunManifest,
    RunStatus,
    Unit,
)
from fsdp_inspect.trace.tables import (
    MISSING_INT,
    EventTable,
    MemoryTable,
    ScalarTable,
)
from fsdp_inspect.writing import replace_file

UNIT_PARAMETERS = 218_000_000
"""The parameters of about a Llama block of 8 billion parameters."""

_FORWARD_NS, _BACKWARD_NS = 600_000, 1_200_000
_GATHER_NS, _REDUCE_NS = 500_000, 700_000
_COPY_NS = 40_000
_IDLE_NS = 4_000_000
"""The mean idle time over the steps."""
_NOISE_RATIO = 0.2
"""Durations are shorter than planned by up to this fraction."""
_BYTES_PER_UNIT = 200
"""Measured bytes of the run folder for each rank, step and unit."""
_BLOCK_BYTES = 512
"""The rounding of CUDA's allocator."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a run."""

    num_ranks: int
    num_steps: int = 100
    num_units: int = 64


def write_large_run(folder: Path, shape: Shape, *, processes: int | None = None) -> Path:
    """Write a complete, compacted run; returns its folder.

    Args:
        folder: The run folder; about 1.2 MB for each rank of 100 steps and 64 units.
        shape: The size of the run.
        processes: The number of ranks to write together; default one for each CPU.

    Raises:
        OSError: The disk has less than twice the required space.
    """
    _check_room(folder, shape)
    create_run(folder, make_manifest(shape))
    write = partial(_write_rank, folder, shape)
    context = multiprocessing.get_context("spawn")
    workers = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(write, range(shape.num_ranks), chunksize=4))
    sum_up(folder)
    return folder


def write_part(whole: Path, folder: Path, shape: Shape) -> Path:
    """Write a smaller run of the first ranks of a larger one, with linked tables."""
    create_run(folder, make_manifest(shape, run_id=folder.name))
    for rank in range(shape.num_ranks):
        source, target = rank_folder(whole, 0, rank), rank_folder(folder, 0, rank)
        target.mkdir()
        for table in source.glob("*.parquet"):
            os.link(table, target / table.name)
        write_record(folder, shape, rank)
    sum_up(folder)
    return folder


def write_repeated_run(folder: Path, shape: Shape, *, distinct: int) -> Path:
    """Write a run like `write_large_run` in a fraction of the time and space; returns its folder.

    Args:
        folder: The run folder.
        shape: The size of the run.
        distinct: The number of generated ranks; the others repeat them.
    """
    few = min(distinct, shape.num_ranks)
    create_run(folder, make_manifest(shape))
    for rank in range(few):
        _write_rank(folder, shape, rank)
    for rank in range(few, shape.num_ranks):
        repeat_rank(folder, shape, rank, rank % few)
    sum_up(folder)
    return folder


def sum_up(folder: Path) -> None:
    """Write the summary of the run, as the last rank of a recording does."""
    if not write_run_summary(folder):
        raise RuntimeError(f"The summary of {str(folder)!r} was not written: a rank lacks its own.")


def make_manifest(shape: Shape, run_id: str = "") -> RunManifest:
    """The manifest of rank 0; compared runs need different ids."""
    group = ProcessGroup(index=0, name="shard", ranks=list(range(shape.num_ranks)), role="shard")
    return RunManifest(
        run_id=run_id or f"large-{shape.num_ranks}",
        name=f"{shape.num_ranks} ranks, {shape.num_steps} steps, {shape.num_units} units",
        created="2026-01-01T00:00:00+00:00",
        created_unix_ns=1_767_225_600_000_000_000,
        model=ModelInfo(
            class_name="Transformer",
            num_parameters=UNIT_PARAMETERS * shape.num_units,
            num_trainable_parameters=UNIT_PARAMETERS * shape.num_units,
        ),
        plan=_make_plan(shape).to_dict(),
        units=[_make_unit(index, shape) for index in range(shape.num_units)],
        process_groups=[group],
        world_size=shape.num_ranks,
        mesh={"dp_shard": shape.num_ranks},
        backend="nccl",
        device_type="cuda",
        device_name="made up for a benchmark",
        warmup_steps=min(3, shape.num_steps - 1),
    )


def make_events(rank: int, shape: Shape) -> EventTable:
    """All events of one rank."""
    step = _lay_out_step(shape.num_units)
    noise = np.random.default_rng(rank)
    per_step = len(step)
    columns = {name: np.tile(values, shape.num_steps) for name, values in step.columns().items()}
    number = np.repeat(np.arange(shape.num_steps), per_step)
    is_step = columns["kind"] == EventKind.STEP
    is_collective = columns["sequence"] != MISSING_INT
    for name in ("sequence", "collective"):
        has_one = columns[name] != MISSING_INT
        columns[name] = columns[name] + has_one * number * per_step
    durations = columns["end_ns"] - columns["start_ns"]
    shorter = (durations * noise.random(len(durations)) * _NOISE_RATIO).astype(np.int64)
    columns["start_ns"] = columns["start_ns"] + shorter * is_collective
    columns["end_ns"] = columns["end_ns"] - shorter * ~(is_collective | is_step)
    idle_ns = _idle_at_end(rank, shape)
    columns["end_ns"] = columns["end_ns"] + is_step * idle_ns[number]
    step_ns = int(step.end_ns[step.kind == EventKind.STEP][0]) + idle_ns
    begins = (1_000_000_000 * (rank + 1) + np.cumsum(step_ns) - step_ns)[number]
    for name in ("issue_ns", "start_ns", "end_ns", "need_ns"):
        values = columns[name]
        columns[name] = np.where(values == MISSING_INT, values, values + begins)
    return EventTable.from_columns({**columns, "step": number})


def _idle_at_end(rank: int, shape: Shape) -> NDArray[np.int64]:
    """The idle time of a rank at the end of each step, which is mostly equal for all ranks."""
    shared = np.random.default_rng([0, 2]).exponential(_IDLE_NS, shape.num_steps)
    own = np.random.default_rng([rank, 2]).exponential(_IDLE_NS / 100, shape.num_steps)
    return (shared + own).astype(np.int64)


def make_memory(rank: int, events: EventTable) -> MemoryTable:
    """Allocator samples at the boundaries of every unit and at the end of every step."""
    samples = events.where(np.isin(events.kind, list(_POINT_OF_KIND)))
    points = np.zeros(len(samples), dtype=np.int8)
    for kind, point in _POINT_OF_KIND.items():
        points[samples.kind == kind] = point
    noise = np.random.default_rng([rank, 1]).integers(0, 1 << 21, len(samples))
    height = 40 * (1 << 30) + (samples.unit.astype(np.int64) << 26)
    allocated = (height + noise * _BLOCK_BYTES) * (points != MemoryPoint.STEP_END) + (20 << 30) * (
        points == MemoryPoint.STEP_END
    )
    reserved = np.full(len(samples), 70 << 30)
    known = {
        "step": samples.step,
        "phase": samples.phase,
        "point": points,
        "unit": samples.unit,
        "time_ns": samples.end_ns,
        "allocated": allocated,
        "reserved": reserved,
        "active": allocated,
        "peak_allocated": np.maximum.accumulate(allocated),
        "peak_reserved": reserved,
    }
    nothing = np.full(len(samples), MISSING_INT)
    zero = {name: np.zeros(len(samples)) for name in ("microbatch", "method")}
    return MemoryTable.from_columns({**dict.fromkeys(MemoryTable.DTYPES, nothing), **zero, **known})


_POINT_OF_KIND = {
    EventKind.ALL_GATHER_COPY_OUT: MemoryPoint.AFTER_UNSHARD,
    EventKind.FORWARD: MemoryPoint.FORWARD_END,
    EventKind.BACKWARD: MemoryPoint.BACKWARD_END,
    EventKind.REDUCE_SCATTER_WAIT: MemoryPoint.BACKWARD_START,
    EventKind.STEP: MemoryPoint.STEP_END,
}


def _check_room(folder: Path, shape: Shape) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed = 2 * _BYTES_PER_UNIT * shape.num_ranks * shape.num_steps * shape.num_units
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{str(folder)!r} has {format_bytes(free)} left. Expected {format_bytes(needed)} for a "
            f"run of {shape.num_ranks} ranks. Free some, set TMPDIR, or ask for fewer ranks."
        )


def _write_rank(folder: Path, shape: Shape, rank: int) -> None:
    events = make_events(rank, shape)
    write_rank(folder, shape, rank, events, make_memory(rank, events))


def write_rank(
    folder: Path, shape: Shape, rank: int, events: EventTable, memory: MemoryTable
) -> None:
    """Write the record, the tables and the summary of a rank."""
    target = rank_folder(folder, 0, rank)
    target.mkdir(exist_ok=True)
    write_record(folder, shape, rank)
    _write_table(target, EVENTS, events)
    _write_table(target, MEMORY, memory)
    _write_table(target, SCALARS, _make_loss(shape))
    compact_rank(folder, 0, rank)


def repeat_rank(
    folder: Path, shape: Shape, rank: int, source: int, *, clock_of: int | None = None
) -> None:
    """Write a rank with the linked tables of another rank, and with its own summary of them."""
    target = rank_folder(folder, 0, rank)
    target.mkdir(exist_ok=True)
    write_record(folder, shape, rank, clock_of=clock_of)
    for file in (EVENTS, MEMORY, SCALARS):
        name = file.compacted_name
        if (table := rank_folder(folder, 0, source) / name).exists():
            os.link(table, target / name)
    rows = read_rank_summary(LocalFiles(folder), (0, source))
    if rows is None:
        raise RuntimeError(f"Rank {source} in {str(folder)!r} has no summary to repeat.")
    write_rank_summary(target, replace(rows, rank=np.full_like(rows.rank, rank)))


def _write_table(target: Path, file: TableFile[TableT], table: TableT) -> None:
    write_compacted(target / file.compacted_name, file, table, covered_rows=len(table))


def write_record(folder: Path, shape: Shape, rank: int, *, clock_of: int | None = None) -> None:
    """Write the record of a rank that recorded the whole run.

    Args:
        folder: The run folder.
        shape: The size of the run.
        rank: The rank.
        clock_of: The rank whose clock its tables use; default: the rank itself.
    """
    begun = 1_767_225_600_000_000_000
    clock = rank if clock_of is None else clock_of
    record = RankRecord(
        rank=rank,
        world_size=shape.num_ranks,
        local_rank=rank % 8,
        host=f"node-{rank // 8:04d}",
        pid=1000 + rank,
        device=f"cuda:{rank % 8}",
        device_memory_bytes=80 << 30,
        clock="cuda_event",
        clock_start=ClockPair(monotonic_ns=10**9 * (clock + 1), unix_ns=begun, uncertainty_ns=500),
        clock_uncertainty_ns=2000,
        status=RunStatus.COMPLETE,
        num_steps=shape.num_steps,
        flushed_unix_ns=begun,
        memory_from="cuda_allocator",
        scalar_names=["loss"],
    )
    replace_file(rank_folder(folder, 0, rank) / RANK_FILE, encode_record(record))


def _make_loss(shape: Shape) -> ScalarTable:
    steps = np.arange(shape.num_steps)
    return ScalarTable.from_columns(
        {
            "step": steps,
            "name": np.zeros(shape.num_steps),
            "time_ns": steps * 10**8,
            "value": 11.0 / np.sqrt(1.0 + steps),
        }
    )


def _make_plan(shape: Shape) -> Plan:
    names = [_name_unit(index) for index in range(shape.num_units)]
    units = [
        UnitPlan(modules=(name,), param_dtype="bfloat16", reduce_dtype="float32") for name in names
    ]
    return Plan(units=tuple(units), world_size=shape.num_ranks, mesh={"shard": shape.num_ranks})


def _name_unit(index: int) -> str:
    return "" if index == 0 else f"layers.{index - 1}"


def _make_unit(index: int, shape: Shape) -> Unit:
    fqn = _name_unit(index)
    return Unit(
        index=index,
        fqn=fqn,
        modules=[fqn],
        module_class="Transformer" if index == 0 else "TransformerBlock",
        num_parameters=UNIT_PARAMETERS,
        num_trainable_parameters=UNIT_PARAMETERS,
        num_tensors=9,
        unsharded_bytes=2 * UNIT_PARAMETERS,
        sharded_bytes=4 * UNIT_PARAMETERS // shape.num_ranks,
        reduce_bytes=4 * UNIT_PARAMETERS,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        reshard_after_forward=True,
        shard_group=0,
        is_root=index == 0,
        execution_index=index,
    )


def _lay_out_step(num_units: int) -> EventTable:
    """Lay out one step from time 0, as FSDP2 runs it on CUDA; each unit is gathered one ahead."""
    rows = list(_StepLayout(num_units).rows())
    return EventTable.from_rows(rows)


class _StepLayout:
    """Lays events on the streams of a device, in ns from the start of the step."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._now = 0
        """The time of the compute stream."""
        self._network = 0
        """The time at which the communicator is free."""
        self._collectives = 0
        self._phase = Phase.DATA

    def rows(self) -> Iterator[dict[str, int]]:
        yield self._row(EventKind.DATA, 0, 2 * _COPY_NS)
        self._now = 2 * _COPY_NS
        self._phase, begin = Phase.FORWARD, self._now
        for unit in range(self._num_units):
            yield from self._gather(unit)
            yield self._compute(EventKind.FORWARD, unit, _FORWARD_NS)
        yield self._row(EventKind.FORWARD, begin, self._now)
        self._phase, begin = Phase.BACKWARD, self._now
        reduced = self._now
        for unit in reversed(range(self._num_units)):
            yield from self._gather(unit)
            yield self._compute(EventKind.BACKWARD, unit, _BACKWARD_NS)
            reduced = yield from self._reduce(unit, reduced)
        self._now = max(self._now, reduced)
        yield self._row(EventKind.BACKWARD, begin, self._now)
        self._phase = Phase.OPTIMIZER
        yield self._compute(EventKind.OPTIMIZER, NO_UNIT, 5_000_000)
        self._phase = Phase.OUTSIDE
        yield self._row(EventKind.STEP, 0, self._now)

    def _gather(self, unit: int) -> Iterator[dict[str, int]]:
        """Wait now for the gather, which was issued one unit earlier."""
        issue = max(self._now - _FORWARD_NS, 0)
        start = max(self._network, issue + _COPY_NS)
        end = self._network = start + _GATHER_NS
        self._collectives += 1
        tied = {"unit": unit, "collective": self._collectives, "flags": int(EventFlag.PREFETCHED)}
        copy_in = {**tied, "stream": Stream.ALL_GATHER_COPY_IN, "issue_ns": issue}
        yield self._row(EventKind.ALL_GATHER_COPY_IN, start - _COPY_NS, start, **copy_in)
        sent = {"stream": Stream.ALL_GATHER, "issue_ns": issue, "bytes": 2 * UNIT_PARAMETERS}
        numbered = {"group": 0, "sequence": self._collectives, "need_ns": self._now}
        yield self._row(EventKind.ALL_GATHER, start, end, **tied, **sent, **numbered)
        yield self._row(EventKind.ALL_GATHER_WAIT, self._now, max(self._now, end), **tied)
        self._now = max(self._now, end)
        yield self._compute(EventKind.ALL_GATHER_COPY_OUT, unit, _COPY_NS)

    def _reduce(self, unit: int, before: int) -> Iterator[dict[str, int]]:
        """Reduce the unit's gradients; the compute stream waits for the previous reduction."""
        self._collectives += 1
        tied = {"unit": unit, "collective": self._collectives}
        yield self._row(EventKind.REDUCE_SCATTER_WAIT, self._now, max(self._now, before), **tied)
        self._now = max(self._now, before)
        yield self._compute(EventKind.REDUCE_SCATTER_COPY_IN, unit, _COPY_NS)
        start = max(self._network, self._now)
        end = self._network = start + _REDUCE_NS
        sent = {"stream": Stream.REDUCE_SCATTER, "bytes": 4 * UNIT_PARAMETERS, "group": 0}
        numbered = {"sequence": self._collectives, "need_ns": self._now + _BACKWARD_NS}
        numbered["need_ns"] = min(numbered["need_ns"], end)
        yield self._row(EventKind.REDUCE_SCATTER, start, end, **tied, **sent, **numbered)
        return end

    def _compute(self, kind: EventKind, unit: int, duration_ns: int) -> dict[str, int]:
        start, self._now = self._now, self._now + duration_ns
        return self._row(kind, start, self._now, unit=unit)

    def _row(self, kind: EventKind, start: int, end: int, **columns: int) -> dict[str, int]:
        nothing = dict.fromkeys(("sequence", "collective", "bytes", "need_ns"), MISSING_INT)
        return {
            **dict.fromkeys(EventTable.DTYPES, 0),
            **nothing,
            "phase": self._phase,
            "kind": kind,
            "unit": NO_UNIT,
            "issued_by": columns.get("unit", NO_UNIT),
            "stream": Stream.COMPUTE,
            "group": -1,
            "issue_ns": max(start - _FORWARD_NS, 0),
            "start_ns": start,
            "end_ns": end,
            **columns,
        }
