"""Measure the cost of each FSDP unit: its collectives, copies, forward and backward.

All numbers are per step, in the typical step of one rank ([Note: the typical step] in
`store.reduction.timed_steps`), unless stated otherwise. Bus bandwidth is that of nccl-tests
(`trace.links`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.gather_distances import GatherDistances, measure_gather_distances
from fsdp_inspect.analysis.step_selection import inspected_rank, timed_ranks
from fsdp_inspect.columns import (
    Column,
    TableSpec,
    metric_column,
    number_column,
    text_column,
    unit_column,
)
from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import COPIES, EventFlag, EventKind, Phase
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit
from fsdp_inspect.trace.tables import EventTable, SummaryTable, rows_of

_COLLECTIVES_OF_A_UNIT = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class UnitCollective:
    """One unit's collectives of one kind."""

    count_per_step: float
    """Mean number over all timed steps, because an expert may run in few steps and in no typical
    step. 0 for a group of one rank, and for frozen parameters."""
    bytes: int | None
    """Full padded message of one collective: the output of an all-gather, the input of a
    reduce-scatter."""
    group_size: int | None
    """Number of ranks that take part; None without a group."""
    duration_ns: int | None
    """Mean duration of one collective."""
    exposed_ns: int
    """Exposed time per step."""
    bus_bytes_per_s: float | None
    """Bus bandwidth; None for a group of one rank."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One FSDP unit and its cost per step."""

    index: int
    fqn: str
    """The unit's name; empty for the root."""
    module_class: str
    execution_index: int | None
    """Position in the first recorded forward; None if it never ran."""
    num_parameters: int | None
    """Number of parameters; None if an import does not record it, like the next four fields."""
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
    """All-reduces under HSDP. The count is 0 without HSDP."""
    exposed_ns: int | None
    """Exposed time of all collectives of the unit, per step; None if the import shows no
    collective."""
    prefetched_per_step: float
    """All-gathers per step that are issued before their own unit needs them."""
    copies_ns: int | None
    """Time of FSDP's copies between parameters and communication buffers; None if an import does
    not record them, like the next two fields."""
    forward_ns: int | None
    """Time from parameters ready to output, including nested units and waits for them."""
    backward_ns: int | None
    """Time from parameters ready to gradients complete, including nested units, waits for them and
    recompute."""
    recompute_ns: int
    """Forward work that activation checkpointing repeats in backward. It is part of
    `backward_ns`."""


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


@dataclass(frozen=True, slots=True)
class UnitKindCost:
    """The collectives of one kind of one unit, as a row of `UnitCosts.COLLECTIVES`."""

    fqn: str
    """The unit's name; empty for the root."""
    kind: str
    """`all_gather`, `reduce_scatter` or `all_reduce`."""
    collective: UnitCollective


def _read_collective(name: str) -> Callable[[UnitKindCost], Any]:
    return lambda row: getattr(row.collective, name)


@dataclass(frozen=True, slots=True)
class UnitCosts(TableResult):
    """The costs of all units of the model, on one rank."""

    run_id: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    notes: tuple[str, ...]
    """Missing or unusual data of the run, one sentence each."""
    rank: int | None
    """The rank; None without a timed step, and every time is then 0 or None."""
    num_steps: int
    units: tuple[UnitCost, ...]
    """The units in order of execution. Units that never run come last."""
    distances: GatherDistances | None
    """The prefetch and reuse distances of ZeRO-3, in the order of `units`; None for others."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Units in the typical step",
        (
            unit_column("The name of the unit."),
            metric_column("exposed_ns", label="exposed"),
            metric_column("forward_ns"),
            metric_column("backward_ns"),
            metric_column(
                "recompute_ns",
                lambda unit: None if unit.backward_ns is None else unit.recompute_ns,
            ),
            metric_column("copies_ns"),
            *_collective_columns("all_gather"),
            *_collective_columns("reduce_scatter"),
            *_collective_columns("all_reduce"),
            metric_column("prefetched_per_step"),
            metric_column("num_parameters", label="params"),
            number_column(
                "num_trainable_parameters", "Parameters with a gradient.", label="trainable"
            ),
            metric_column("unsharded_bytes"),
            Column(
                "sharded_bytes",
                "sharded",
                "the rank's shard of the parameters, padding included",
                MetricUnit.BYTES,
                lambda unit: unit.sharded_bytes,
            ),
            text_column(
                "reshard_after_forward",
                "The setting: True, False, or the number of ranks that keep a copy.",
                lambda unit: (
                    None
                    if unit.reshard_after_forward is None
                    else str(unit.reshard_after_forward).lower()
                ),
                label="reshard",
            ),
            text_column("module_class", "The class of its first module.", label="class"),
            text_column("param_dtype", "The dtype of unsharded parameters."),
            text_column("reduce_dtype", "The dtype of gradients in a reduction."),
            metric_column("reduce_bytes", metric="bytes", label="gradient message"),
            number_column("index", "The index of the unit in the manifest."),
            number_column(
                "execution_index", "The position in the first recorded forward.", label="order"
            ),
        ),
    )
    DISTANCES: ClassVar[TableSpec] = GatherDistances.TABLE
    """The columns of `distances.units`."""
    COLLECTIVES: ClassVar[TableSpec] = TableSpec(
        "Collectives of each unit",
        (
            unit_column("The name of the unit."),
            text_column(
                "collective", "The kind of collective.", lambda row: row.kind.replace("_", "-")
            ),
            metric_column("count_per_step", _read_collective("count_per_step"), label="n"),
            metric_column("bytes", _read_collective("bytes")),
            metric_column("duration_ns", _read_collective("duration_ns")),
            metric_column("exposed_ns", _read_collective("exposed_ns"), label="exposed"),
            metric_column("bus_bytes_per_s", _read_collective("bus_bytes_per_s"), label="bus"),
            number_column(
                "group_size", "The ranks that take part.", _read_collective("group_size")
            ),
        ),
    )
    """The columns of `collectives()`."""

    def collectives(self) -> Sequence[UnitKindCost]:
        """The collectives by unit and kind, without the kinds that no unit has."""
        kinds = [kind.label for kind in _COLLECTIVES_OF_A_UNIT if self._has_kind(kind)]
        return [
            UnitKindCost(unit.fqn, kind, getattr(unit, kind))
            for unit in self.units
            for kind in kinds
        ]

    def _has_kind(self, kind: EventKind) -> bool:
        """Whether a unit has such collectives, or shards over a group, which may have one rank."""
        found = [getattr(unit, kind.label) for unit in self.units]
        if any(each.count_per_step for each in found):
            return True
        return kind is not EventKind.ALL_REDUCE and not self._are_replicated

    @property
    def _are_replicated(self) -> bool:
        """Whether every rank keeps all parameters."""
        return bool(self.units) and all(
            unit.all_gather.group_size is None and unit.all_reduce.group_size is not None
            for unit in self.units
        )

    def rows(self) -> Sequence[UnitCost]:
        """The units in order of execution. Units that never ran come last."""
        return self.units


def measure_units(run: RunSource, *, rank: int | None = None) -> UnitCosts:
    """Measure the cost of each unit per step.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None:
        timed, gathers, steps = SummaryTable.empty(), EventTable.empty(), np.empty(0, np.int32)
    else:
        steps, timed = member.typical_steps, member.rows
        gathers = run.events(member.rank, steps=steps.tolist(), kinds=[EventKind.ALL_GATHER])
    timed = timed.where(timed.phase != Phase.EVALUATION)
    trained = _UnitRows(timed.where(np.isin(timed.step, steps)), len(steps))
    all_steps = _UnitRows(timed, 0 if member is None else len(member.steps))
    prefetched = gathers.where((gathers.flags & EventFlag.PREFETCHED) != 0)
    recompute_ns = {} if member is None else _measure_recompute(run, member.rank, trained, steps)
    units = [
        _measure_unit(
            unit,
            run.manifest,
            trained.of_unit(unit.index),
            all_steps.of_unit(unit.index),
            prefetched.where(prefetched.unit == unit.index),
            recompute_ns.get(unit.index, 0),
        )
        for unit in run.manifest.units
    ]
    if timed_ranks(run).lacks_communication:
        units = [replace(unit, exposed_ns=None) for unit in units]
    return UnitCosts(
        run_id=run.manifest.run_id,
        source=run.manifest.source,
        notes=tuple(run.notes),
        rank=None if member is None else member.rank,
        num_steps=0 if member is None else len(member.steps),
        units=tuple(sorted(units, key=_execution_order)),
        distances=measure_gather_distances(run, member),
    )


@dataclass(frozen=True, slots=True)
class _UnitRows:
    """Summary rows of one rank's typical steps, with the number of these steps."""

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
        """Return the mean over the steps of the column's sum in each step."""
        return float(getattr(self.rows, column).sum() / max(self.num_steps, 1))

    def per_step(self, column: str) -> int:
        """Return `mean_per_step`, rounded."""
        return round(self.mean_per_step(column))


def _execution_order(unit: UnitCost) -> tuple[bool, int]:
    return unit.execution_index is None, unit.execution_index or 0


def _measure_unit(
    unit: Unit,
    manifest: RunManifest,
    own: _UnitRows,
    timed: _UnitRows,
    prefetched: EventTable,
    recompute_ns: int,
) -> UnitCost:
    sizes = {group.index: len(group.ranks) for group in manifest.process_groups}
    shard, replicate = sizes.get(unit.shard_group), sizes.get(unit.replicate_group)
    gathers = own.of_kind(EventKind.ALL_GATHER)
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
        all_gather=_measure_collective(
            gathers,
            timed.of_kind(EventKind.ALL_GATHER),
            shard,
            _gather_factor(gathers, unit, shard),
        ),
        reduce_scatter=_measure_collective(
            own.of_kind(EventKind.REDUCE_SCATTER),
            timed.of_kind(EventKind.REDUCE_SCATTER),
            shard,
            bus_factor(EventKind.REDUCE_SCATTER, shard or 0),
        ),
        all_reduce=_measure_collective(
            own.of_kind(EventKind.ALL_REDUCE),
            timed.of_kind(EventKind.ALL_REDUCE),
            replicate,
            bus_factor(EventKind.ALL_REDUCE, replicate or 0),
        ),
        exposed_ns=own.of_kind(*_COLLECTIVES_OF_A_UNIT).per_step("exposed_ns"),
        prefetched_per_step=len(prefetched) / max(own.num_steps, 1),
        copies_ns=_known_time(own.of_kind(*sorted(COPIES)), manifest),
        forward_ns=_known_time(own.of_kind(EventKind.FORWARD, phase=Phase.FORWARD), manifest),
        backward_ns=_known_time(own.of_kind(EventKind.BACKWARD), manifest),
        recompute_ns=recompute_ns,
    )


_INSIDE_RECOMPUTE = (
    EventKind.RECOMPUTE,
    EventKind.FORWARD,
    EventKind.ALL_GATHER,
    EventKind.ALL_GATHER_COPY_IN,
    EventKind.ALL_GATHER_COPY_OUT,
    EventKind.ALL_GATHER_WAIT,
)


def _measure_recompute(
    run: RunSource, rank: int, trained: _UnitRows, steps: NDArray[np.int32]
) -> dict[int, int]:
    """Measure the repeated forwards of each unit per step.

    A checkpoint around several units repeats their forwards inside the backward of one of them.
    Each unit then gets its own forward. The all-gathers for it are not recompute.
    """
    repeats = trained.of_kind(EventKind.RECOMPUTE).rows
    if not len(repeats) and not len(trained.of_kind(EventKind.FORWARD, phase=Phase.BACKWARD).rows):
        return {}
    events = run.events(rank, steps=steps.tolist(), kinds=_INSIDE_RECOMPUTE)
    events = events.where(events.phase == Phase.BACKWARD)
    is_recompute = events.kind == EventKind.RECOMPUTE
    is_forward = events.kind == EventKind.FORWARD
    blocks = events.where(~is_recompute & ((events.flags & EventFlag.ASYNC) == 0))
    blocks = blocks.where(np.argsort(blocks.start_ns, kind="stable"))
    found = {}
    for unit in np.unique(events.unit[is_recompute | is_forward]).tolist():
        is_own = events.unit == unit
        own = events.where(is_recompute & is_own)
        others = _inner_units(own, blocks.where(blocks.unit != unit))
        repeated = _spans(own).subtract(others).union(_spans(events.where(is_forward & is_own)))
        found[unit] = round(repeated.duration_ns / max(len(steps), 1))
    return found


def _inner_units(recomputes: EventTable, others: EventTable) -> Intervals:
    """The time of other units inside recomputes, from each all-gather to the end of its forward.

    Args:
        recomputes: Repeated forwards of one unit.
        others: All-gathers and forwards of other units, by start.
    """
    starts, ends = list[int](), list[int]()
    for first, last in zip(recomputes.start_ns, recomputes.end_ns, strict=True):
        low, high = np.searchsorted(others.start_ns, [first, last])
        units, unit_ends = others.unit[low:high], others.end_ns[low:high]
        for unit in np.unique(units).tolist():
            chosen = units == unit
            starts.append(int(others.start_ns[low:high][chosen].min()))
            ends.append(min(int(unit_ends[chosen].max()), int(last)))
    return Intervals.of(starts, ends)


def _spans(events: EventTable) -> Intervals:
    return Intervals.of(events.start_ns, events.end_ns)


def _known(unit: Unit, value: int) -> int | None:
    """Return a number of a unit; None if it is 0 because an import does not record it."""
    return value if value or unit.are_sizes_known else None


def _known_time(own: _UnitRows, manifest: RunManifest) -> int | None:
    """Return a time per step; None without such an event if the source may lack them.

    A trace may lack such events, and a unit that is not a module has no passes.
    """
    is_complete = manifest.source != "imported" and manifest.sharder_traits.units_have_passes
    if not (is_complete or len(own.rows)):
        return None
    return own.per_step("duration_ns")


def _measure_collective(
    own: _UnitRows, timed: _UnitRows, group_size: int | None, factor: float
) -> UnitCollective:
    """Measure the collectives of one kind.

    Args:
        own: The rows of the typical steps.
        timed: The rows of all timed steps. They give the sizes and durations of a unit that no
            typical step runs.
        group_size: The number of ranks.
        factor: Converts message bytes to bus bytes.
    """
    per_step, exposed_ns = timed.mean_per_step("count"), own.per_step("exposed_ns")
    own = own if len(own.rows) else timed
    # A size of 0 bytes means that the size was not recorded.
    message = median(own.rows.bytes // np.maximum(own.rows.count, 1)) or None
    count = int(own.rows.count.sum())
    total_ns = int(own.rows.duration_ns.sum())
    bandwidth = None
    if message and total_ns and factor > 0:
        bandwidth = message * factor * count / total_ns * 1e9
    return UnitCollective(
        count_per_step=per_step,
        bytes=message,
        group_size=group_size,
        duration_ns=round(total_ns / count) if count else None,
        exposed_ns=exposed_ns,
        bus_bytes_per_s=bandwidth,
    )


def _gather_factor(gathers: _UnitRows, unit: Unit, shard: int | None) -> float:
    """Return the mean of (N-1)/N over the unit's all-gathers of a step.

    With an integer `reshard_after_forward`, the all-gathers of backward run in a smaller group of
    that size. Otherwise every all-gather runs in the shard group.
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


# --- Find a unit by its name.


def find_unit(manifest: RunManifest, name: str) -> Unit:
    """Return the unit with this name; `(root)` or the empty string is the root.

    Raises:
        MissingDataError: The run has no such unit. The message lists the closest names.
    """
    units = {format_unit(unit.fqn): unit for unit in manifest.units}
    found = units.get(format_unit(name))
    if found is None:
        nearest = suggest(name, list(units), what="units")
        raise MissingDataError(
            f"Unit {name!r} not found in run {manifest.run_id!r}. {nearest} `fsdp-inspect show "
            "RUN units` lists all units."
        )
    return found
