"""Measure what each FSDP unit costs: its collectives, copies, forward and backward.

All numbers are those of the typical step of one rank ([Note: the typical step] in
`analysis.step_selection`), per step unless said otherwise.
Bus bandwidth is that of nccl-tests (`trace.bus_bandwidth`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.columns import (
    Column,
    TableSpec,
    metric_column,
    number_column,
    text_column,
)
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.results import TableResult
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.bus_bandwidth import bus_factor
from fsdp_inspect.trace.codes import COPIES, EventFlag, EventKind, Phase
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit
from fsdp_inspect.trace.tables import EventTable, SummaryTable, rows_of

_COLLECTIVES_OF_A_UNIT = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class UnitCollective:
    """One unit's collectives of one kind."""

    count_per_step: float
    """Mean over the typical steps; 0 when the unit has none: a group of one rank, or frozen
    parameters."""
    bytes: int | None
    """Full padded message of one collective: all-gather output, reduce-scatter input."""
    group_size: int | None
    """Ranks that take part; None without a group."""
    duration_ns: int | None
    """Mean duration of one collective."""
    exposed_ns: int
    """Per step: how long the rank waits for them."""
    bus_bytes_per_s: float | None
    """None for a group of one rank."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One FSDP unit: what it is, and what it costs per step."""

    index: int
    fqn: str
    """Empty for the root."""
    module_class: str
    execution_index: int | None
    """Position in the first recorded forward; None if it never ran."""
    num_parameters: int | None
    """None where an import does not tell, as with the next four."""
    num_trainable_parameters: int | None
    unsharded_bytes: int | None
    sharded_bytes: int | None
    reduce_bytes: int | None
    param_dtype: str
    reduce_dtype: str
    reshard_after_forward: bool | int | None
    all_gather: UnitCollective
    reduce_scatter: UnitCollective
    all_reduce: UnitCollective
    """HSDP; count 0 elsewhere."""
    exposed_ns: int
    """Of all its collectives, per step."""
    prefetched_per_step: float
    """All-gathers issued before their own unit asked for them."""
    copies_ns: int | None
    """FSDP's copies between parameters and communication buffers; None, like the next two, where
    an import does not tell."""
    forward_ns: int | None
    """From parameters ready to output; holds nested units."""
    backward_ns: int | None
    """From parameters ready to gradients complete; holds nested units and recomputation."""
    recompute_ns: int
    """Forward work repeated in backward by activation checkpointing; inside `backward_ns`."""


def _collective_columns(kind: str) -> tuple[Column, ...]:
    """The columns of one kind of collective: `all_gather_exposed_ns` and so on."""
    words = kind.replace("_", "-")

    def read(name: str) -> Callable[[UnitCost], Any]:
        def value(unit: UnitCost) -> Any:
            collective: UnitCollective = getattr(unit, kind)
            return getattr(collective, name) if collective.count_per_step else None

        return value

    return tuple(
        metric_column(f"{kind}_{name}", read(name), metric=name, label=f"{words}: {label}")
        for name, label in (
            ("exposed_ns", "exposed"),
            ("duration_ns", "duration"),
            ("count_per_step", "per step"),
            ("bytes", "message"),
            ("bus_bytes_per_s", "bus"),
        )
    )


COLLECTIVES_TABLE = TableSpec(
    "Collectives of the unit in the typical step",
    (
        metric_column("count_per_step"),
        metric_column("bytes"),
        number_column("group_size", "Ranks of the process group.", label="ranks"),
        metric_column("duration_ns"),
        metric_column("exposed_ns", label="exposed per step"),
        metric_column("bus_bytes_per_s"),
    ),
)
"""The columns of `UnitCollective`."""


@dataclass(frozen=True, slots=True)
class UnitCosts(TableResult):
    """All units of the model, as one rank saw them."""

    run_id: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    notes: tuple[str, ...]
    """What is missing or odd about the run, in words."""
    rank: int | None
    """None: no timed step, so every time is 0 or None."""
    num_steps: int
    units: tuple[UnitCost, ...]
    """In order of execution, those that never ran last."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Units in the typical step",
        (
            text_column("unit", "The unit's name.", lambda unit: format_unit(unit.fqn)),
            metric_column("exposed_ns", label="exposed"),
            metric_column("forward_ns"),
            metric_column("backward_ns"),
            metric_column("recompute_ns"),
            metric_column("copies_ns"),
            *_collective_columns("all_gather"),
            *_collective_columns("reduce_scatter"),
            *_collective_columns("all_reduce"),
            metric_column("prefetched_per_step"),
            metric_column("num_parameters"),
            metric_column("unsharded_bytes"),
            text_column(
                "reshard_after_forward",
                "The setting: True, False, or the number of ranks that keep a copy.",
                lambda unit: str(unit.reshard_after_forward),
            ),
            text_column("module_class", "The class of its first module.", label="class"),
        ),
    )

    def rows(self) -> Sequence[UnitCost]:
        """The units in order of execution, those that never ran last."""
        return self.units


def measure_units(run: RunSource, *, rank: int | None = None) -> UnitCosts:
    """What each unit costs per step.

    Args:
        run: A recorded run.
        rank: Default the median rank.

    Raises:
        IncompleteRunError: The run holds nothing of that rank.
    """
    member = timed_rank(run, rank)
    if member is None:
        rows, gathers, steps = SummaryTable.empty(), EventTable.empty(), np.empty(0, np.int32)
    else:
        steps = member.typical_steps
        rows = member.rows.where(np.isin(member.rows.step, steps))
        gathers = run.events(member.rank, steps=steps.tolist(), kinds=[EventKind.ALL_GATHER])
    trained = _UnitRows(rows.where(rows.phase != Phase.EVALUATION), len(steps))
    prefetched = gathers.where((gathers.flags & EventFlag.PREFETCHED) != 0)
    units = [
        _measure_unit(
            unit, run.manifest, trained.of_unit(unit.index), _of_unit(prefetched, unit.index)
        )
        for unit in run.manifest.units
    ]
    return UnitCosts(
        run_id=run.manifest.run_id,
        source=run.manifest.source,
        notes=tuple(run.notes),
        rank=None if member is None else member.rank,
        num_steps=0 if member is None else len(member.steps),
        units=tuple(sorted(units, key=_execution_order)),
    )


@dataclass(frozen=True, slots=True)
class _UnitRows:
    """Summary rows of one rank's typical steps, and how many steps these are."""

    rows: SummaryTable
    num_steps: int

    def of_unit(self, unit: int) -> "_UnitRows":
        return _UnitRows(self.rows.where(self.rows.unit == unit), self.num_steps)

    def of_kind(self, *kinds: EventKind, phase: Phase | None = None) -> "_UnitRows":
        chosen = rows_of(self.rows, kinds=kinds)
        if phase is not None:
            chosen = chosen.where(chosen.phase == phase)
        return _UnitRows(chosen, self.num_steps)

    def mean_per_step(self, column: str) -> float:
        """Mean over the steps of the column's sum in each step."""
        return float(getattr(self.rows, column).sum() / max(self.num_steps, 1))

    def per_step(self, column: str) -> int:
        """The same, rounded."""
        return round(self.mean_per_step(column))


def _of_unit(events: EventTable, unit: int) -> EventTable:
    return events.where(events.unit == unit)


def _execution_order(unit: UnitCost) -> tuple[bool, int]:
    return unit.execution_index is None, unit.execution_index or 0


def _measure_unit(
    unit: Unit, manifest: RunManifest, own: _UnitRows, prefetched: EventTable
) -> UnitCost:
    sizes = {group.index: len(group.ranks) for group in manifest.process_groups}
    shard, replicate = sizes.get(unit.shard_group), sizes.get(unit.replicate_group)
    gathers = own.of_kind(EventKind.ALL_GATHER)
    recompute_ns = own.of_kind(EventKind.RECOMPUTE).per_step("duration_ns") + own.of_kind(
        EventKind.FORWARD, phase=Phase.BACKWARD
    ).per_step("duration_ns")
    return UnitCost(
        index=unit.index,
        fqn=unit.fqn,
        module_class=unit.module_class,
        execution_index=None if unit.execution_index < 0 else unit.execution_index,
        num_parameters=_known(unit, unit.num_parameters),
        num_trainable_parameters=_known(unit, unit.num_trainable_parameters),
        unsharded_bytes=_known(unit, unit.unsharded_bytes),
        sharded_bytes=unit.sharded_bytes or None,
        reduce_bytes=_known(unit, unit.reduce_bytes),
        param_dtype=unit.param_dtype,
        reduce_dtype=unit.reduce_dtype,
        reshard_after_forward=unit.reshard_after_forward,
        all_gather=_measure_collective(gathers, shard, _gather_factor(gathers, unit, shard)),
        reduce_scatter=_measure_collective(
            own.of_kind(EventKind.REDUCE_SCATTER),
            shard,
            bus_factor(EventKind.REDUCE_SCATTER, shard or 0),
        ),
        all_reduce=_measure_collective(
            own.of_kind(EventKind.ALL_REDUCE),
            replicate,
            bus_factor(EventKind.ALL_REDUCE, replicate or 0),
        ),
        exposed_ns=own.of_kind(*_COLLECTIVES_OF_A_UNIT).per_step("exposed_ns"),
        prefetched_per_step=len(prefetched) / max(own.num_steps, 1),
        copies_ns=_told(own.of_kind(*sorted(COPIES)), manifest),
        forward_ns=_told(own.of_kind(EventKind.FORWARD, phase=Phase.FORWARD), manifest),
        backward_ns=_told(own.of_kind(EventKind.BACKWARD), manifest),
        recompute_ns=recompute_ns,
    )


def _known(unit: Unit, value: int) -> int | None:
    """A number of a unit; None where 0 says only that an import does not tell."""
    return value if value or unit.are_sizes_known else None


def _told(own: _UnitRows, manifest: RunManifest) -> int | None:
    """A time per step; None where an import holds no such event, which need not mean no time."""
    if manifest.source == "imported" and not len(own.rows):
        return None
    return own.per_step("duration_ns")


def _measure_collective(own: _UnitRows, group_size: int | None, factor: float) -> UnitCollective:
    """Sum up one kind of collective; `factor` turns message bytes into bus bytes."""
    # A message of 0 bytes is one whose size was not recorded.
    message = median(own.rows.bytes // np.maximum(own.rows.count, 1)) or None
    count = int(own.rows.count.sum())
    duration = round(float(own.rows.duration_ns.sum() / count)) if count else None
    bandwidth = None
    if message and duration and factor > 0:
        bandwidth = message * factor / duration * 1e9
    return UnitCollective(
        count_per_step=own.mean_per_step("count"),
        bytes=message,
        group_size=group_size,
        duration_ns=duration,
        exposed_ns=own.per_step("exposed_ns"),
        bus_bytes_per_s=bandwidth,
    )


def _gather_factor(gathers: _UnitRows, unit: Unit, shard: int | None) -> float:
    """The mean of (N-1)/N over the unit's gathers of a step.

    With an integer `reshard_after_forward` the gathers of backward run in the smaller group of
    that size; elsewhere every gather runs in the shard group.
    """
    reshard = unit.reshard_after_forward
    in_shard_group = bus_factor(EventKind.ALL_GATHER, shard or 0)
    if reshard is None or isinstance(reshard, bool):
        return in_shard_group
    in_backward = gathers.of_kind(EventKind.ALL_GATHER, phase=Phase.BACKWARD).mean_per_step("count")
    total = gathers.mean_per_step("count")
    in_forward = total - in_backward
    if total == 0:
        return in_shard_group
    in_small_group = bus_factor(EventKind.ALL_GATHER, reshard)
    return (in_forward * in_shard_group + in_backward * in_small_group) / total
