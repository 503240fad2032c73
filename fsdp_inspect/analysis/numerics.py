"""Measure the numerics of a run: where values stopped being finite, norms, and lost updates.

Norms are those of the whole unit: the squared norms of the shards are added up over the ranks of
one shard group. A unit that every rank holds whole counts once. Only ranks whose files are here
count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_inspect.analysis.dtype_uses import DtypeUse, compare_dtypes
from fsdp_inspect.columns import (
    Column,
    TableSpec,
    number_column,
    text_column,
    unit_column,
    value_column,
)
from fsdp_inspect.formatting import format_owner
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.numerics import NumericsStep, Observation, Place
from fsdp_inspect.trace.run import RunManifest, RunSource

_STORED = frozenset({Place.PARAMETER, Place.UPDATED_PARAMETER, Place.STATE})
"""Places that keep a non-finite value for the next step."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first non-finite values."""

    step: int
    rank: int
    fqn: str | None
    """The name of the unit; None: parameters of no unit."""
    place: Place
    count: int
    total: int
    last_finite_step: int | None
    """The previous numerics step; None: there was none."""


@dataclass(frozen=True, slots=True)
class UnitNumerics:
    """One unit in the last numerics step."""

    fqn: str | None
    """The name of the unit; None: parameters of no unit."""
    gradient_norm: float | None
    """Norm of the gradients that the optimizer received; None if it was not finite, or without
    gradients."""
    parameter_norm: float | None
    update_ratio: float | None
    """Norm of the update / norm of the parameters."""
    largest_output: float | None
    """Largest magnitude of a forward output."""
    num_non_finite: int
    """Number of non-finite values at all places, on all ranks."""
    lost_ratio: float | None
    """Updates that changed no stored value / updates that should change it, as the median over the
    numerics steps. None if the optimizer keeps a copy in higher precision, or without an update."""
    parameter_dtype: str
    state_dtype: str


@dataclass(frozen=True, slots=True)
class Numerics(TableResult):
    """The numerics of a run."""

    TABLE: ClassVar[TableSpec]

    steps: tuple[int, ...]
    """The numerics steps."""
    ranks: tuple[int, ...]
    """The ranks that recorded the numerics steps."""
    units: tuple[UnitNumerics, ...]
    first_non_finite: NonFinite | None
    """None: parameters and optimizer states stayed finite. Gradients alone may overflow, because a
    gradient scaler expects it."""
    lost_ratio: float | None
    """`UnitNumerics.lost_ratio` over all units together."""
    stored_dtypes: tuple[str, ...]
    """Dtypes of the stored parameters."""
    dtypes: tuple[DtypeUse, ...]
    """Declared and actual dtypes, by place."""
    other_dtypes: tuple[DtypeUse, ...]
    """Entries of `dtypes` that differ from the declaration and lose precision."""

    def rows(self) -> Sequence[UnitNumerics]:
        """One row per unit."""
        return self.units


def measure_numerics(run: RunSource) -> Numerics | None:
    """Measure the numerics of a run; None if it has no numerics step."""
    steps = {record.rank: list(run.numerics(record.rank)) for record in run.ranks}
    steps = {rank: each for rank, each in steps.items() if each}
    if not steps:
        return None
    numbers = sorted({each.step for found in steps.values() for each in found})
    units = sorted(
        {each.unit for found in steps.values() for step in found for each in step.observations}
    )
    manifest = run.manifest
    measured = [_measure_unit(unit, steps, numbers[-1], manifest) for unit in units]
    dtypes = {
        dtype
        for found in steps.values()
        for each in found[-1].observations
        if each.place is Place.PARAMETER
        for dtype in each.dtypes
    }
    uses = compare_dtypes(run, steps, numbers[-1])
    return Numerics(
        steps=tuple(numbers),
        ranks=tuple(steps),
        units=tuple(measured),
        first_non_finite=_find_first(steps, numbers, manifest),
        lost_ratio=_lost_ratio(steps, None),
        stored_dtypes=tuple(sorted(dtypes)),
        dtypes=uses,
        other_dtypes=tuple(each for each in uses if not each.is_as_declared),
    )


def gradient_norms(run: RunSource) -> dict[str | None, list[tuple[int, float | None]]]:
    """The norm of each unit's gradients in each numerics step, by step; None: not finite.

    A step is left out if the norm is not known on all ranks of the unit's shard group.
    """
    manifest = run.manifest
    by_step: dict[int, dict[int, NumericsStep]] = {}
    for record in run.ranks:
        for each in run.numerics(record.rank):
            by_step.setdefault(each.step, {})[record.rank] = each
    found: dict[str | None, list[tuple[int, float | None]]] = {}
    for number in sorted(by_step):
        steps = by_step[number]
        units = {each.unit for step in steps.values() for each in step.observations}
        for unit in sorted(units):
            own = {
                rank: {each.place: each for each in step.observations if each.unit == unit}
                for rank, step in steps.items()
            }
            group = _ranks_of_whole(unit, manifest, own)
            if all(Place.REDUCED_GRADIENT in own.get(rank, {}) for rank in group):
                norm = _norm(own, Place.REDUCED_GRADIENT, group)
                found.setdefault(_name(unit, manifest), []).append((number, norm))
    return found


def _measure_unit(
    unit: int, steps: Mapping[int, Sequence[NumericsStep]], last: int, manifest: RunManifest
) -> UnitNumerics:
    at_last = {rank: step for rank, found in steps.items() for step in found if step.step == last}
    own = {
        rank: {each.place: each for each in step.observations if each.unit == unit}
        for rank, step in at_last.items()
    }
    group = _ranks_of_whole(unit, manifest, own)
    gradient = _norm(own, Place.REDUCED_GRADIENT, group)
    parameter = _norm(own, Place.PARAMETER, group)
    changes = [
        each.squared_change
        for rank, step in at_last.items()
        for each in step.updates
        if each.unit == unit and rank in group
    ]
    change = _root(changes)
    outputs = [found[Place.OUTPUT] for found in own.values() if Place.OUTPUT in found]
    return UnitNumerics(
        fqn=_name(unit, manifest),
        gradient_norm=gradient,
        parameter_norm=parameter,
        update_ratio=change / parameter if change is not None and parameter else None,
        largest_output=_largest(outputs),
        num_non_finite=sum(
            each.num_non_finite for found in own.values() for each in found.values()
        ),
        lost_ratio=_lost_ratio(steps, unit),
        parameter_dtype=_dtypes(own, Place.PARAMETER),
        state_dtype=_dtypes(own, Place.STATE),
    )


def _ranks_of_whole(unit: int, manifest: RunManifest, own: Iterable[int]) -> set[int]:
    """The recorded ranks that together hold one copy of a unit.

    These are the ranks of the shard group that rank 0 or the lowest rank knows. For a unit that
    every rank holds whole, it is one rank. If the group is unknown, these are all ranks.
    """
    ranks = set(own)
    if not 0 <= unit < len(manifest.units):
        return ranks
    if manifest.units[unit].is_replicated:
        return {min(ranks)} if ranks else ranks
    groups = {group.index: group.ranks for group in manifest.process_groups}
    return set(groups.get(manifest.units[unit].shard_group, ())) or ranks


def _norm(
    own: Mapping[int, Mapping[Place, Observation]], place: Place, ranks: Iterable[int]
) -> float | None:
    return _root(
        [own[rank][place].squared_norm for rank in ranks if rank in own and place in own[rank]]
    )


def _root(squares: Sequence[float | None]) -> float | None:
    known = [each for each in squares if each is not None]
    return math.sqrt(math.fsum(known)) if known and len(known) == len(squares) else None


def _largest(found: Sequence[Observation]) -> float | None:
    values = [each.largest for each in found if each.largest is not None]
    return max(values) if values and len(values) == len(found) else None


def _dtypes(own: Mapping[int, Mapping[Place, Observation]], place: Place) -> str:
    found = {dtype for each in own.values() if place in each for dtype in each[place].dtypes}
    return ", ".join(sorted(found))


def _lost_ratio(steps: Mapping[int, Sequence[NumericsStep]], unit: int | None) -> float | None:
    """Lost / intended updates of a unit, or of all units, as the median over the numerics steps."""
    lost: dict[int, int] = {}
    meant: dict[int, int] = {}
    for found in steps.values():
        for step in found:
            for each in step.updates:
                if unit is None or each.unit == unit:
                    lost[step.step] = lost.get(step.step, 0) + each.num_lost
                    meant[step.step] = meant.get(step.step, 0) + each.num_meant
    ratios = [lost[step] / count for step, count in meant.items() if count]
    return statistics.median(ratios) if ratios else None


def _find_first(
    steps: Mapping[int, Sequence[NumericsStep]], numbers: Sequence[int], manifest: RunManifest
) -> NonFinite | None:
    """The first non-finite values in the first step that stored such values."""
    stored = [
        step.step
        for found in steps.values()
        for step in found
        if any(each.num_non_finite and each.place in _STORED for each in step.observations)
    ]
    if not stored:
        return None
    number = min(stored)
    found_at, found_rank = min(
        (
            (each, rank)
            for rank, found in steps.items()
            for step in found
            if step.step == number
            for each in step.observations
            if each.num_non_finite
        ),
        key=lambda pair: (pair[0].order, pair[1]),
    )
    earlier = [step for step in numbers if step < number]
    return NonFinite(
        step=number,
        rank=found_rank,
        fqn=_name(found_at.unit, manifest),
        place=found_at.place,
        count=found_at.num_non_finite,
        total=found_at.count,
        last_finite_step=earlier[-1] if earlier else None,
    )


def _name(unit: int, manifest: RunManifest) -> str | None:
    return manifest.units[unit].fqn if NO_UNIT < unit < len(manifest.units) else None


def _norm_column(name: str, label: str, definition: str) -> Column:
    return value_column(name, MetricUnit.NUMBER, definition, label=label)


Numerics.TABLE = TableSpec(
    "Units in the last numerics step",
    (
        unit_column("The FSDP unit", lambda row: format_owner(row.fqn, None)),
        _norm_column(
            "gradient_norm", "gradient", "Norm of the gradients that the optimizer received"
        ),
        _norm_column("update_ratio", "update", "Norm of the update / norm of the parameters"),
        _norm_column("largest_output", "output", "Largest magnitude of a forward output"),
        value_column(
            "lost_ratio",
            MetricUnit.RATIO,
            "Updates that changed no stored value / updates that should change one; the median "
            "over the numerics steps",
            label="lost",
        ),
        number_column(
            "num_non_finite",
            "Values that are not finite: outputs, gradients, parameters, optimizer states",
            label="not finite",
        ),
        text_column("parameter_dtype", "Dtype of the stored parameters", label="stored"),
        text_column("state_dtype", "Dtypes of the optimizer states", label="states"),
    ),
)
