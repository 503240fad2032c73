"""Measure the numerics of a run: where values stopped being finite, norms, and lost updates.

Norms are those of the whole unit: the squared norms of the shards are added up over the ranks of
one shard group. A unit that every rank holds whole counts once. A norm is unknown if a rank of the
group lacks the step, because its files are missing or a kill or an edit removed its lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fsdp_inspect.analysis.scalars import measure_loss
from fsdp_inspect.columns import (
    Column,
    TableSpec,
    number_column,
    text_column,
    unit_column,
    value_column,
)
from fsdp_inspect.formatting import format_owner, listed
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, NO_UNIT, EventKind
from fsdp_inspect.trace.numerics import NumericsStep, Observation, Place
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit

_STORED = frozenset({Place.PARAMETER, Place.UPDATED_PARAMETER, Place.STATE})
"""Places that keep a non-finite value for the next step."""
_WITH_ALL_RANKS = ("recorded", "imported")
"""Sources of runs with a folder for each rank."""


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
    """The previous numerics step that all ranks recorded; None: there was none."""
    ranks: tuple[int, ...]
    """All ranks whose first such values are in the same unit and place."""
    is_exact: bool
    """Whether they arose here: every rank recorded this step, and it shows that the parameters were
    finite at its start, or the step before was a numerics step. Otherwise they arose in any step
    since `last_finite_step`, and have spread to other units and ranks since."""
    loss_step: int | None = None
    """The first step with a loss that is not finite; None: it was not seen."""
    has_recovered: bool = False
    """Whether the parameters of all ranks were finite later, as after a return to a checkpoint."""


@dataclass(frozen=True, slots=True)
class UnitNumerics:
    """One unit in the numerics step `Numerics.step`."""

    fqn: str | None
    """The name of the unit; None: parameters of no unit."""
    gradient_norm: float | None
    """Norm of the gradients that the optimizer received; None if it was not finite, without
    gradients, or if a rank of the shard group lacks the step."""
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
    step: int
    """The step of `units` and `dtypes`: the last one that most ranks recorded."""
    ranks: tuple[int, ...]
    """The ranks that recorded numerics steps."""
    missing_ranks: tuple[int, ...]
    """The ranks without `step`; counts and maxima lack them."""
    incomplete_steps: tuple[int, ...]
    """The numerics steps that a rank lacks."""
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
    lacking = {number: _ranks_without(number, steps, manifest) for number in numbers}
    last = min(numbers, key=lambda number: (len(lacking[number]), -number))
    measured = [_measure_unit(unit, steps, last, manifest) for unit in units]
    dtypes = {
        dtype
        for found in steps.values()
        for each in found[-1].observations
        if each.place is Place.PARAMETER
        for dtype in each.dtypes
    }
    uses = compare_dtypes(run, steps, last)
    return Numerics(
        steps=tuple(numbers),
        step=last,
        ranks=tuple(steps),
        missing_ranks=lacking[last],
        incomplete_steps=tuple(number for number in numbers if lacking[number]),
        units=tuple(measured),
        first_non_finite=_with_later_looks(_find_first(steps, lacking, run), run),
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
            has_gradient = any(Place.REDUCED_GRADIENT in found_at for found_at in own.values())
            if has_gradient and group <= own.keys():
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
    change = _root(changes) if group <= own.keys() else None
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


def _ranks_without(
    number: int, steps: Mapping[int, Sequence[NumericsStep]], manifest: RunManifest
) -> tuple[int, ...]:
    """The ranks of the run that lack a numerics step."""
    having = {rank for rank, found in steps.items() if any(each.step == number for each in found)}
    return tuple(sorted(_expected_ranks(manifest) - having))


def _expected_ranks(manifest: RunManifest) -> set[int]:
    """All ranks of the run. Emulated and predicted runs have rank 0 only."""
    return set(range(manifest.world_size if manifest.source in _WITH_ALL_RANKS else 1))


def _ranks_of_whole(unit: int, manifest: RunManifest, own: Iterable[int]) -> set[int]:
    """The ranks that together hold one copy of a unit.

    These are the ranks of the shard group that rank 0 or the lowest rank knows. For a unit that
    every rank holds whole, it is one recorded rank. If the group is unknown, these are all ranks.
    """
    if 0 <= unit < len(manifest.units):
        if manifest.units[unit].is_replicated:
            return set(sorted(own)[:1])
        groups = {group.index: group.ranks for group in manifest.process_groups}
        known = groups.get(manifest.units[unit].shard_group)
        if known:
            return set(known)
    return _expected_ranks(manifest)


def _norm(
    own: Mapping[int, Mapping[Place, Observation]], place: Place, ranks: Iterable[int]
) -> float | None:
    """The norm over these ranks; None if a rank lacks the step."""
    if not own.keys() >= set(ranks):
        return None
    return _root([own[rank][place].squared_norm for rank in ranks if place in own[rank]])


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
    steps: Mapping[int, Sequence[NumericsStep]],
    lacking: Mapping[int, tuple[int, ...]],
    run: RunSource,
) -> NonFinite | None:
    """The first non-finite values in the first step that stored such values, without masks.

    Args:
        steps: The numerics steps by rank.
        lacking: The ranks that lack a numerics step, by step. A step that a rank lacks does not
            show that values were finite in it.
        run: The run.
    """
    masked, manifest = find_masked_units(run), run.manifest

    def is_wrong(each: Observation) -> bool:
        is_mask = each.unit in masked and each.place in (Place.PARAMETER, Place.UPDATED_PARAMETER)
        return bool(each.num_non_finite) and not is_mask

    stored = [
        step.step
        for found in steps.values()
        for step in found
        if any(is_wrong(each) and each.place in _STORED for each in step.observations)
    ]
    if not stored:
        return None
    number = min(stored)
    seen = [
        (each, rank)
        for rank, found in steps.items()
        for step in found
        if step.step == number
        for each in step.observations
        if is_wrong(each)
    ]
    found_at, found_rank = min(seen, key=lambda pair: (pair[0].order, pair[1]))
    earlier = [step for step, ranks in lacking.items() if step < number and not ranks]
    arose_here = found_at.place not in (Place.PARAMETER, Place.STATE)
    is_next = bool(earlier) and earlier[-1] == number - 1
    return NonFinite(
        step=number,
        rank=found_rank,
        fqn=_name(found_at.unit, manifest),
        place=found_at.place,
        count=found_at.num_non_finite,
        total=found_at.count,
        last_finite_step=earlier[-1] if earlier else None,
        ranks=tuple(
            rank
            for each, rank in seen
            if (each.unit, each.place, each.order)
            == (found_at.unit, found_at.place, found_at.order)
        ),
        is_exact=(arose_here or is_next) and not lacking[number],
    )


def find_masked_units(run: RunSource) -> frozenset[int]:
    """The units with values that are not finite by design: before step 1, with finite losses."""
    seen = [each.training.values for each in run.ranks if each.training is not None]
    if any(each.loss_step is not None for each in seen) and not is_finite_again(run):
        return frozenset()
    return frozenset(unit for each in seen for unit in each.masked)


def is_finite_again(run: RunSource) -> bool:
    """Whether the last loss that the training logged is finite; False: it logged none."""
    series = measure_loss(run)
    return series is not None and math.isfinite(series.values[-1])


def _name(unit: int, manifest: RunManifest) -> str | None:
    return manifest.units[unit].fqn if NO_UNIT < unit < len(manifest.units) else None


def _norm_column(name: str, label: str, definition: str) -> Column:
    return value_column(name, MetricUnit.NUMBER, definition, label=label)


Numerics.TABLE = TableSpec(
    "Units in a numerics step",
    (
        unit_column("The FSDP unit", lambda row: format_owner(row.fqn)),
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


# --- Compare the dtypes that a sharding declares with those of the values.
#
# Values are those of the last numerics step. The dtypes of gathers and reductions are those of the
# messages of its collectives.

_GATHER, _REDUCTION = "gathered parameter", "reduction"
_PLACES = (
    Place.PARAMETER.value,
    _GATHER,
    Place.OUTPUT.value,
    Place.GRADIENT.value,
    _REDUCTION,
    Place.REDUCED_GRADIENT.value,
    Place.STATE.value,
)
"""Places in the order of a step."""
_MAY_BE_WIDER = frozenset({Place.OUTPUT.value, Place.STATE.value})
"""Places where a wider dtype than the declared one loses nothing."""
_BYTES_ALONE = "uint8"
"""Messages of several dtypes are gathered as bytes."""


@dataclass(frozen=True, slots=True)
class DtypeUse:
    """The dtype of the values at one place."""

    place: str
    declared: str | None
    """The declared dtype. Gathered parameter, output and gradient: the dtype of forward and
    backward. Reduction: its dtype. Reduced gradient and optimizer state: the dtype of the stored
    parameters. None: no dtype is declared (stored parameters)."""
    actual: str
    is_as_declared: bool
    """True also if no dtype is declared, and if a wider dtype loses nothing."""
    units: tuple[str | None, ...]
    """The units by name; None: parameters of no unit."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Declared and actual dtypes",
        (
            text_column("place", "The place at which the values were read."),
            text_column(
                "declared", "The declared dtype; - if none is.", lambda use: use.declared or "-"
            ),
            text_column("actual", "The dtype of the values."),
            text_column(
                "is_as_declared",
                "Whether the values have at least the declared precision.",
                lambda use: "yes" if use.is_as_declared else "no",
                label="as declared",
            ),
            text_column(
                "units", "The units.", lambda use: listed([*map(format_owner, use.units)], 3)
            ),
        ),
    )


def compare_dtypes(
    run: RunSource, steps: Mapping[int, Sequence[NumericsStep]], last: int
) -> tuple[DtypeUse, ...]:
    """Compare declared and actual dtypes in the last numerics step.

    Args:
        run: The run.
        steps: The numerics steps by rank.
        last: The number of the last numerics step.
    """
    units: dict[tuple[str, str, str], set[int]] = {}
    for rank, own in steps.items():
        for step in (each for each in own if each.step == last):
            for unit, place, actual, declared in _seen(run, rank, step):
                units.setdefault((place, declared, actual), set()).add(unit)
    return tuple(
        DtypeUse(
            place,
            declared or None,
            actual,
            _is_as_declared(place, declared, actual),
            tuple(_name(unit, run.manifest) for unit in sorted(found)),
        )
        for (place, declared, actual), found in sorted(
            units.items(), key=lambda item: (_PLACES.index(item[0][0]), item[0])
        )
    )


def _seen(run: RunSource, rank: int, step: NumericsStep) -> Iterator[tuple[int, str, str, str]]:
    """Yield unit, place, actual and declared dtype of one rank's values; empty: not declared."""
    known = run.manifest.units
    stored = {
        each.unit: ", ".join(each.dtypes)
        for each in step.observations
        if each.place is Place.PARAMETER
    }
    for each in step.observations:
        if each.place is Place.UPDATED_PARAMETER:
            continue
        unit = known[each.unit] if 0 <= each.unit < len(known) else None
        declared = _declared(each.place, each.dtypes, unit, stored.get(each.unit, ""))
        yield each.unit, each.place.value, ", ".join(each.dtypes), declared
    events = run.events(rank, steps=[step.step])
    for kind, place in (
        (EventKind.ALL_GATHER, _GATHER),
        (EventKind.REDUCE_SCATTER, _REDUCTION),
        (EventKind.ALL_REDUCE, _REDUCTION),
    ):
        own = events.where((events.kind == kind) & (events.unit >= 0))
        for index, code in sorted(set(zip(own.unit.tolist(), own.dtype.tolist(), strict=True))):
            actual = DTYPES[code] if 0 < code < len(DTYPES) else _BYTES_ALONE
            if index < len(known) and actual != _BYTES_ALONE:
                unit = known[index]
                declared = unit.param_dtype if place == _GATHER else unit.reduce_dtype
                yield index, place, actual, declared


def _declared(place: Place, actual: Sequence[str], unit: Unit | None, stored: str) -> str:
    if place in (Place.REDUCED_GRADIENT, Place.STATE):
        return stored
    if unit is None or place is Place.PARAMETER:
        return ""
    # Accumulated gradients have the dtype of the reduction.
    is_accumulated = place is Place.GRADIENT and [*actual] == [unit.reduce_dtype]
    return unit.reduce_dtype if is_accumulated else unit.param_dtype


def _is_as_declared(place: str, declared: str, actual: str) -> bool:
    if not declared or set(declared.split(", ")) & set(actual.split(", ")):
        return True
    return place in _MAY_BE_WIDER and _bytes(actual) >= _bytes(declared)


def _bytes(dtypes: str) -> int:
    """The bytes per element of the narrowest dtype."""
    return min(ITEMSIZE.get(name, 0) for name in dtypes.split(", "))


def _with_later_looks(first: NonFinite | None, run: RunSource) -> NonFinite | None:
    """Add what the ranks saw of their loss, and of their parameters after this step."""
    seen = [each.training.values for each in run.ranks if each.training is not None]
    if first is None or not seen:
        return first
    losses = [each.loss_step for each in seen if each.loss_step is not None]
    later = [each.step is None and (each.finite_step or 0) > first.step for each in seen]
    return replace(
        first,
        loss_step=min(losses, default=None),
        has_recovered=all(later) and len(seen) == len(run.ranks),
    )
