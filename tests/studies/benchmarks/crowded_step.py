"""Write a run folder with a single step of very many intervals.

A step of a large run on 16 ranks is repeated as microbatches (gradient accumulation) until it has
the requested number of events.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fsdp_inspect.store.compacted import write_compacted
from fsdp_inspect.store.compaction import compact_rank, write_run_summary
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.schema import EVENTS, MEMORY
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable
from tests.studies.benchmarks import large_run
from tests.studies.benchmarks.large_run import Shape, make_manifest

NUM_RANKS = 16
_NUM_UNITS = 64
_EVENTS_PER_UNIT = 13


def write_crowded_run(folder: Path, num_intervals: int) -> Path:
    """Write a compacted run whose only step has about this number of events; returns its folder."""
    per_microbatch = NUM_RANKS * _NUM_UNITS * _EVENTS_PER_UNIT
    microbatches = max(round(num_intervals / per_microbatch), 1)
    units = max(min(_NUM_UNITS, num_intervals // (NUM_RANKS * _EVENTS_PER_UNIT)), 2)
    shape = Shape(NUM_RANKS, num_steps=microbatches, num_units=units)
    one_step = Shape(NUM_RANKS, num_steps=1, num_units=units)
    create_run(folder, make_manifest(one_step))
    for rank in range(NUM_RANKS):
        target = rank_folder(folder, 0, rank)
        target.mkdir(parents=True, exist_ok=True)
        large_run.write_record(folder, one_step, rank)
        events = _as_one_step(large_run.make_events(rank, shape))
        memory = large_run.make_memory(rank, events)
        for file, table in ((EVENTS, events), (MEMORY, memory)):
            write_compacted(target / file.compacted_name, file, table, covered_rows=len(table))
        compact_rank(folder, 0, rank)
    write_run_summary(folder)
    return folder


def _as_one_step(events: EventTable) -> EventTable:
    """The same events as microbatches of step 0."""
    is_step = events.kind == EventKind.STEP
    whole = events.where(np.flatnonzero(is_step)[:1]).columns()
    first, last = int(events.start_ns[is_step].min()), int(events.end_ns[is_step].max())
    step = {**whole, "start_ns": np.array([first]), "end_ns": np.array([last])}
    rest = events.where(~is_step)
    microbatches = {**rest.columns(), "microbatch": rest.step, "step": np.zeros(len(rest))}
    return EventTable.concat([EventTable.from_columns(step), EventTable.from_columns(microbatches)])
