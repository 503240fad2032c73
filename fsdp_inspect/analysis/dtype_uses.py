"""Compare the dtypes that a sharding declares with those of the values.

Values are those of the last numerics step. The dtypes of gathers and reductions are those of the
messages of its collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_inspect.columns import TableSpec, text_column
from fsdp_inspect.formatting import format_owner
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, EventKind
from fsdp_inspect.trace.numerics import NumericsStep, Place
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit

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
            text_column("units", "The units.", lambda use: _name_units(use.units)),
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


def _name(unit: int, manifest: RunManifest) -> str | None:
    return manifest.units[unit].fqn if 0 <= unit < len(manifest.units) else None


def _name_units(units: Sequence[str | None]) -> str:
    names = ", ".join(format_owner(unit, None) for unit in units[:3])
    return names if len(units) <= 3 else f"{names}, {len(units) - 3} more"
