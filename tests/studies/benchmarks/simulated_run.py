"""Write a run of which `advise` can simulate plans: its step follows FSDP's schedule.

`large_run` lays events at fixed places, which no schedule gives. Here the step of a model of Llama
blocks is simulated and written as recorded. It has a memory step. The steps differ by a factor, and
all ranks share the tables of rank 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdp_inspect.simulation.parameters import padded_numel
from fsdp_inspect.simulation.policies import policies_of
from fsdp_inspect.simulation.recorded import Execution, simulate_step
from fsdp_inspect.simulation.recorded_memory import measure_memory_work
from fsdp_inspect.simulation.simulate import predicted_events
from fsdp_inspect.simulation.workload import Op, Piece, UnitWork, Workload, passes_of, tape_of
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.trace.codes import MemoryPoint, Method, Source
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest, Unit
from fsdp_inspect.trace.tables import MISSING_INT, EventTable, MemoryTable
from tests.studies.benchmarks.large_run import (
    Shape,
    make_manifest,
    make_memory,
    repeat_rank,
    sum_up,
    write_rank,
)

_BLOCK = {
    "attention_norm.weight": [4096],
    "attention.wq.weight": [4096, 4096],
    "attention.wk.weight": [1024, 4096],
    "attention.wv.weight": [1024, 4096],
    "attention.wo.weight": [4096, 4096],
    "ffn_norm.weight": [4096],
    "feed_forward.w1.weight": [14336, 4096],
    "feed_forward.w2.weight": [4096, 14336],
    "feed_forward.w3.weight": [14336, 4096],
}
_ROOT = {
    "tok_embeddings.weight": [128256, 4096],
    "norm.weight": [4096],
    "output.weight": [128256, 4096],
}
_LATENCY_NS, _BYTES_PER_NS = 40_000, 700
_FORWARD_NS, _BACKWARD_NS, _LAUNCH_NS, _COPY_NS = 600_000, 1_200_000, 60_000, 40_000
_KEPT_BYTES, _RISE_BYTES = 400 << 20, 1 << 30
"""The activations of a block, and the rise of memory while it runs."""
_MEMORY_STEP = 1
_SPREAD_RATIO = 0.02
"""The longest step is longer than the shortest one by this fraction."""


def write_simulated_run(folder: Path, shape: Shape) -> Path:
    """Write a complete, compacted run; returns its folder.

    Args:
        folder: The run folder. Its tables take the space of one rank, and each rank has a summary.
        shape: The size of the run.
    """
    manifest = _make_manifest(shape)
    workload = _make_workload(manifest, shape)
    events = _make_events(workload, manifest, shape)
    create_run(folder, manifest)
    write_rank(folder, shape, 0, events, _make_memory(workload, manifest, events, shape))
    for rank in range(1, shape.num_ranks):
        repeat_rank(folder, shape, rank, 0, clock_of=0)
    sum_up(folder)
    return folder


def _make_manifest(shape: Shape) -> RunManifest:
    manifest = make_manifest(shape, run_id=f"simulated-{shape.num_ranks}")
    units = [_make_unit(unit, shape) for unit in manifest.units]
    return manifest.model_copy(update={"units": units, "memory_steps": [_MEMORY_STEP]})


def _make_unit(unit: Unit, shape: Shape) -> Unit:
    own = _ROOT if unit.is_root else {f"{unit.fqn}.{name}": each for name, each in _BLOCK.items()}
    numel = sum(math.prod(each) for each in own.values())
    padded = sum(padded_numel(each, shape.num_ranks) for each in own.values())
    sizes = {
        "num_parameters": numel,
        "num_trainable_parameters": numel,
        "num_tensors": len(own),
        "unsharded_bytes": 2 * padded,
        "sharded_bytes": 4 * padded // shape.num_ranks,
        "reduce_bytes": 4 * padded,
        "reshard_after_forward": not unit.is_root,
    }
    return unit.model_copy(update={**sizes, "parameters": own})


def _make_workload(manifest: RunManifest, shape: Shape) -> Workload:
    """The work of a step: the root's embedding, the blocks, and the root's output layer."""
    blocks = range(1, shape.num_units)
    pieces = [
        Piece(unit, _FORWARD_NS, _BACKWARD_NS, 0, _LAUNCH_NS, _LAUNCH_NS)
        for unit in (0, *blocks, 0)
    ]
    units = [
        UnitWork(
            gather_ns=_LATENCY_NS + unit.unsharded_bytes // _BYTES_PER_NS,
            reduce_ns=_LATENCY_NS + unit.reduce_bytes // _BYTES_PER_NS,
            copy_in_ns=_COPY_NS,
            copy_out_ns=_COPY_NS,
            reduce_copy_in_ns=_COPY_NS,
            ends_with_backward=unit.is_root,
        )
        for unit in manifest.units
    ]
    names = [unit.fqn for unit in manifest.units]
    return Workload(
        units=units,
        policies=policies_of(Plan.from_dict(manifest.plan), names, shape.num_ranks),
        pieces=pieces,
        passes=passes_of(tape_of(pieces, root=0), before_forward_ns=10**5, after_forward_ns=10**5),
        after_ns=5_000_000,
        host_ahead_ns=5_000_000,
    )


def _make_events(workload: Workload, manifest: RunManifest, shape: Shape) -> EventTable:
    """The events of all steps of rank 0: the simulated step, each time with another factor."""
    simulated = simulate_step(workload, Execution.STREAM)
    step = predicted_events([simulated], manifest.units, on_host=False)
    count, per_step = shape.num_steps, len(step)
    columns = {name: np.tile(values, count) for name, values in step.columns().items()}
    number = np.repeat(np.arange(count), per_step)
    for name in ("sequence", "collective"):
        columns[name] = columns[name] + (columns[name] != MISSING_INT) * number * per_step
    factors = 1 + _SPREAD_RATIO * np.random.default_rng(0).random(count)
    durations = np.round(simulated.duration_ns * factors).astype(np.int64)
    begins = 1_000_000_000 + np.cumsum(durations) - durations
    for name in ("issue_ns", "start_ns", "end_ns", "need_ns"):
        within = (columns[name] - simulated.start_ns) * factors[number]
        times = begins[number] + np.round(within).astype(np.int64)
        columns[name] = np.where(columns[name] == MISSING_INT, columns[name], times)
    measured = {"source": np.full(len(number), Source.RECORDED)}
    measured["method"] = np.full(len(number), Method.MEASURED)
    return EventTable.from_columns({**columns, **measured, "step": number})


def _make_memory(
    workload: Workload, manifest: RunManifest, events: EventTable, shape: Shape
) -> MemoryTable:
    """Allocator samples of every step, and the categories of the memory step."""
    step = _make_memory_step(workload, manifest)
    known = measure_memory_work(
        step, manifest.units, workload.pieces, workload.passes, shape.num_ranks
    )
    assert known is not None, "the step has samples of every unit"
    passes = tuple(
        replace(one, before_memory=before)
        for one, before in zip(workload.passes, known.before_passes, strict=True)
    )
    played = simulate_step(replace(workload, passes=passes, memory=known.work), Execution.STREAM)
    peaks = step.peak_allocated.copy()
    peaks[-1] = played.peak_bytes
    others = make_memory(0, events.where(events.step != _MEMORY_STEP))
    return MemoryTable.concat([replace(step, peak_allocated=peaks), others])


def _make_memory_step(workload: Workload, manifest: RunManifest) -> MemoryTable:
    """Samples at the boundaries of units, without the memory of communication."""
    sharded = sum(unit.sharded_bytes for unit in manifest.units)
    known = {"sharded_parameter": sharded, "optimizer_state": 2 * sharded}
    rows: list[dict[str, int]] = []
    activations = gradients = rise = 0

    def sample(point: MemoryPoint, phase: int, unit: int) -> None:
        held = 3 * sharded + activations + gradients
        rows.append(
            dict.fromkeys(MemoryTable.DTYPES, MISSING_INT)
            | {"step": _MEMORY_STEP, "microbatch": 0, "phase": phase, "point": point, "unit": unit}
            | {"method": Method.MEASURED, "time_ns": 10**9 + len(rows), "allocated": held}
            | {"peak_allocated": held, "peak_compute": held + rise, "activation": activations}
            | {"unsharded_gradient": gradients, **known}
        )

    for one in workload.passes:
        for op, index in one.tape:
            if op is Op.RUN:
                unit = manifest.units[workload.pieces[index].unit]
                activations += _KEPT_BYTES if one.is_forward else -_KEPT_BYTES
                gradients += 0 if one.is_forward or unit.is_root else unit.unsharded_bytes
                rise = _RISE_BYTES
                continue
            begins = op is Op.ENTER
            if one.is_forward:
                point = MemoryPoint.FORWARD_START if begins else MemoryPoint.FORWARD_END
            else:
                point = MemoryPoint.BACKWARD_START if begins else MemoryPoint.BACKWARD_END
            sample(point, one.phase, index)
            rise = 0
            if point is MemoryPoint.BACKWARD_END:
                gradients = 0
                sample(MemoryPoint.AFTER_REDUCE, one.phase, index)
    return MemoryTable.from_rows(rows)
