"""Define the numerics of a run: finite or not, norms and lost updates, by unit and place.

A rank appends one line of JSON to `numerics.jsonl` for each numerics step. All values describe its
own shards or its own outputs. Squared norms can be added over the ranks of a shard group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Place(StrEnum):
    """The place of an observed value, in the order of a step."""

    PARAMETER = "parameter"
    """The parameters before the first forward of the step."""
    OUTPUT = "forward output"
    GRADIENT = "gradient"
    """The unsharded gradients before their reduction."""
    REDUCED_GRADIENT = "reduced gradient"
    """The gradients that the optimizer receives: after the reduction and after clipping."""
    STATE = "optimizer state"
    """The optimizer state after the update."""
    UPDATED_PARAMETER = "updated parameter"


@dataclass(frozen=True, slots=True)
class Observation:
    """All values of one unit at one place, in one step of one rank."""

    unit: int
    """The unit; -1: parameters that belong to no unit."""
    place: Place
    order: int
    """Number of its first observation in the step, from 0."""
    count: int
    num_non_finite: int
    largest: float | None
    """Largest magnitude; None if a value is not finite."""
    squared_norm: float | None
    """Sum of the squares; None if a value is not finite."""
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The changes that an optimizer made to the shards of one unit, in one step of one rank."""

    unit: int
    num_meant: int
    """Elements that should change: gradient, optimizer state or weight decay is not zero."""
    num_lost: int
    """Of these, the elements whose stored value did not change, because rounding removed the
    update."""
    squared_change: float | None
    """Sum of the squares of the changes; None if a value is not finite."""


@dataclass(frozen=True, slots=True)
class NumericsStep:
    """One numerics step of one rank."""

    step: int
    observations: tuple[Observation, ...]
    updates: tuple[Update, ...]


def encode_step(found: NumericsStep, origin: Mapping[str, Any] | None = None) -> bytes:
    """Encode a step as one line, with the fields of its `TableOrigin` if it is known."""
    line = {
        **({} if origin is None else {"origin": origin}),
        "step": found.step,
        "observations": [
            [
                each.unit,
                each.place.value,
                each.order,
                each.count,
                each.num_non_finite,
                each.largest,
                each.squared_norm,
                list(each.dtypes),
            ]
            for each in found.observations
        ],
        "updates": [
            [each.unit, each.num_meant, each.num_lost, each.squared_change]
            for each in found.updates
        ],
    }
    return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode_steps(
    content: bytes, is_own: Callable[[object], bool] = lambda origin: True
) -> Iterator[NumericsStep]:
    """Decode the steps of a file; incomplete, damaged and foreign lines are left out.

    Args:
        content: The bytes of the file.
        is_own: Whether a line with this origin belongs to the rank; None: it states none.
    """
    for line in content.split(b"\n"):
        try:
            fields = json.loads(line)
            if not is_own(fields.get("origin")):
                continue
            yield NumericsStep(
                _whole(fields["step"]),
                tuple(_observation(*each) for each in fields["observations"]),
                tuple(_update(*each) for each in fields["updates"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue


def _observation(  # noqa: PLR0913 - one argument a value of the line
    unit: Any,
    place: Any,
    order: Any,
    count: Any,
    non_finite: Any,
    largest: Any,
    norm: Any,
    dtypes: Any,
) -> Observation:
    return Observation(
        _unit(unit),
        Place(place),
        _whole(order),
        _whole(count),
        _whole(non_finite),
        _number(largest),
        _number(norm),
        tuple(str(each) for each in dtypes),
    )


def _update(unit: Any, meant: Any, lost: Any, change: Any) -> Update:
    return Update(_unit(unit), _whole(meant), _whole(lost), _number(change))


def _unit(value: Any) -> int:
    if type(value) is int and -1 <= value < 1 << 31:
        return value
    raise ValueError(value)


def _whole(value: Any) -> int:
    if type(value) is int and 0 <= value < 1 << 62:
        return value
    raise ValueError(value)


def _number(value: Any) -> float | None:
    if value is None or (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
        return None if value is None else float(value)
    raise ValueError(value)
