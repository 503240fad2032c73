"""Compare a sharded step with the same step without sharding: the gradients of each unit.

Without sharding, each rank computes the gradient of its own batch with whole parameters. The mean
over the ranks is what the sharded step must have after its reductions.

[Note: Tolerance]
Both runs execute the same kernels on the same values, in the same dtypes. So gradients may differ
by the rounding of the reduction, and by kernels that choose another order. With u, the unit
roundoff of a dtype (half its epsilon), and n ranks whose gradients have norms |g|, the sum of n
values has an error of at most (n - 1) u sum|g| (N. J. Higham, Accuracy and Stability of Numerical
Algorithms, section 4.2). The tolerance of a mean is therefore

    (2 k u_compute + n u_reduce + u_stored) mean|g|

for k backwards in the step, with u_compute at least 2**-15: float32 kernels may change their order.
If a second sharded run differs from the first, three times that difference is the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np

from fsdp_inspect.columns import TableSpec, text_column, unit_column, value_column
from fsdp_inspect.formatting import format_owner
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.step_dump import (
    Array,
    DumpedParameter,
    DumpedUnit,
    StepDump,
    assemble,
    narrower_dtype,
    slices_of,
)

_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_LEAST_ROUNDOFF = 2.0**-15
_OTHER_ROUNDOFF = 2.0**-4
"""Roundoff of dtypes below 16 bits."""
_SAME_FACTOR = 1e-4
_MIN_VALUES = 16
"""A smaller number of values may fit a narrower dtype by chance."""


class StepStatus(StrEnum):
    """Whether the sharded step equals the step without sharding."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "cannot tell"


class StepFault(StrEnum):
    """The faults of a sharded step."""

    OTHER_INPUTS = "other inputs"
    """The two runs got different batches, so nothing can be compared."""
    STALE_PARAMETERS = "stale parameters"
    """A forward used other values than those of the shards."""
    OTHER_OUTPUT = "other output"
    OTHER_LOSS = "other loss"
    """The outputs are equal, but the gradients that enter the model differ, so nothing more can be
    compared. The labels, the weights of the loss, or the models differ between the two runs."""
    MISSING_GRADIENT = "missing gradient"
    """The unsharded step has a gradient where the sharded one has none."""
    NOT_REDUCED = "not reduced"
    """Each rank has its own gradient."""
    SCALED = "wrong factor"
    LOST_PRECISION = "lost precision"
    """Each value fits a narrower dtype than the declared dtypes."""
    OTHER_GRADIENT = "other gradient"
    DIVIDED_TWICE = "divided twice"
    """Both the script and FSDP divide by the number of ranks."""


@dataclass(frozen=True, slots=True)
class UnitGradients:
    """The gradients of one unit in both runs."""

    unit: str | None
    """The name of the unit; None: parameters of no unit."""
    parameters: tuple[str, ...]
    gradient_norm: float
    """Norm of the mean gradient over ranks, without sharding."""
    error_ratio: float
    """Norm of the difference / norm of the gradient without sharding."""
    tolerance_ratio: float
    """The largest difference that rounding explains, / norm of the gradient without sharding."""
    factor: float | None
    """Sharded gradient / gradient without sharding, if they differ only by a factor."""
    fault: StepFault | None
    """The fault of the unit; None: the gradients are equal."""
    worst_parameter: str
    param_dtype: str
    reduce_dtype: str
    lost_dtype: str
    """The narrower dtype that each value fits; empty: none."""


@dataclass(frozen=True, slots=True)
class Equivalence(TableResult):
    """A sharded step compared with the same step without sharding."""

    TABLE: ClassVar[TableSpec]

    status: StepStatus
    fault: StepFault | None
    unit: str | None
    """The first unit with the fault, or the first module if a forward is at fault."""
    ranks: tuple[int, ...]
    """The ranks that show the fault; empty: all."""
    location: str
    """The line of the script behind the fault; empty: unknown."""
    factor: float | None
    """For `SCALED`: sharded / without sharding. For `DIVIDED_TWICE`: the script's own factor."""
    step: int
    """The compared step, from 0."""
    world_size: int
    num_backwards: int
    divide_factor: float | None
    """The script's divide factor of the unit; None: the number of ranks."""
    is_deterministic: bool | None
    """Whether a second sharded run gave the same gradients; None: there was no second run."""
    units: tuple[UnitGradients, ...]
    """The units in the order of backward."""
    notes: tuple[str, ...]

    def rows(self) -> Sequence[UnitGradients]:
        """One row per unit."""
        return self.units


def compare_steps(
    sharded: Sequence[StepDump], whole: Sequence[StepDump], repeat: Sequence[StepDump] = ()
) -> Equivalence:
    """Compare the dumps of all ranks of two runs.

    Args:
        sharded: The dumps of the sharded run.
        whole: The dumps of the run without sharding.
        repeat: The dumps of a second sharded run; empty: there was none.

    Raises:
        FsdpInspectError: A file is damaged.
    """
    units = tuple(_compare_units(sharded, whole, repeat))
    found = _Finding(sharded, whole, repeat, units)
    status, fault, unit, ranks, location, factor = found.judge()
    divided = {each.name: each.divide_factor for each in sharded[0].units}
    return Equivalence(
        status=status,
        fault=fault,
        unit=unit,
        ranks=ranks,
        location=location,
        factor=factor,
        step=sharded[0].step,
        world_size=len(sharded),
        num_backwards=len(sharded[0].backwards),
        divide_factor=divided.get(unit or ""),
        is_deterministic=_is_deterministic(sharded, repeat) if repeat else None,
        units=units,
        notes=tuple(sorted({note for dump in (*sharded, *whole) for note in dump.notes})),
    )


_Judgement = tuple[StepStatus, StepFault | None, str | None, tuple[int, ...], str, float | None]


@dataclass(frozen=True, slots=True)
class _Finding:
    """Finds the first fault of a step: inputs, forward, gradients, then factors."""

    sharded: Sequence[StepDump]
    whole: Sequence[StepDump]
    repeat: Sequence[StepDump]
    units: Sequence[UnitGradients]

    def judge(self) -> _Judgement:
        """Return the status, fault, unit, ranks, line of the script and factor."""
        pairs = list(zip(self.sharded, self.whole, strict=True))
        other = tuple(a.rank for a, b in pairs if a.inputs != b.inputs)
        if other:
            return StepStatus.UNKNOWN, StepFault.OTHER_INPUTS, None, other, "", None
        found = self._judge_forward() or self._judge_gradients() or self._judge_factors()
        if found[0] is StepStatus.EQUAL and len(pairs) == 1:  # a single rank reduces nothing
            return StepStatus.UNKNOWN, None, None, (), "", None
        return found

    def _judge_forward(self) -> _Judgement | None:
        stale = _find_stale(self.sharded, self.whole)
        if stale is not None:
            name, ranks = stale
            unit = _unit_of(self.sharded[0], name)
            return StepStatus.DIFFERENT, StepFault.STALE_PARAMETERS, unit, ranks, "", None
        tolerance = 4 * max(_roundoffs(self.sharded[0].units), default=_LEAST_ROUNDOFF)
        other = _first_other(self.sharded, self.whole, "outputs", tolerance)
        if other is not None:
            name, ranks = other
            status = StepStatus.DIFFERENT
            if self.repeat and _first_other(self.sharded, self.repeat, "outputs", tolerance):
                status = StepStatus.UNKNOWN
            return status, StepFault.OTHER_OUTPUT, name, ranks, "", None
        entered = _first_other(self.sharded, self.whole, "entered", tolerance)
        if entered is not None:
            return StepStatus.UNKNOWN, StepFault.OTHER_LOSS, None, entered[1], "", None
        return None

    def _judge_gradients(self) -> _Judgement | None:
        faulty = [each for each in self.units if each.fault is not None]
        if not faulty:
            return None
        # A sum in all units is right if a global total divides the loss; in some, it is not.
        asked = {each.unit: self._asked_factor(each) for each in faulty}
        is_sum = len(faulty) == len(self.units) and set(asked.values()) == {1.0}
        first = next((each for each in faulty if asked[each.unit] is None), faulty[0])
        status = StepStatus.UNKNOWN if is_sum else StepStatus.DIFFERENT
        location = "" if asked[first.unit] is None else self.sharded[0].divided_at
        factor = first.factor if first.fault is StepFault.SCALED else None
        return status, first.fault, first.unit, (), location, factor

    def _asked_factor(self, judged: UnitGradients) -> float | None:
        """The script's divide factor of a unit, if it explains the scale of its gradient."""
        unit = next((each for each in self.sharded[0].units if each.name == judged.unit), None)
        if judged.fault is not StepFault.SCALED or unit is None or unit.divide_factor is None:
            return None
        is_explained = _is_near(judged.factor or 0.0, unit.num_ranks / unit.divide_factor)
        return unit.divide_factor if is_explained else None

    def _judge_factors(self) -> _Judgement:
        dump = self.sharded[0]
        narrowed = next((each for each in dump.parameters if each.narrowed_to), None)
        if narrowed is not None:
            fault = StepFault.LOST_PRECISION
            return StepStatus.DIFFERENT, fault, narrowed.unit, (), "", None
        equal: _Judgement = (StepStatus.EQUAL, None, None, (), "", None)
        if not self.units:
            return (StepStatus.UNKNOWN, None, None, (), "", None)
        if not dump.backwards or len({each.factor for each in dump.backwards}) > 1:
            return equal
        num_ranks = max((each.num_ranks for each in dump.units), default=1)
        loss, later = dump.backwards[0].factor, _change_after_backward(dump) or 1.0
        per_step = {1.0, 1.0 / len(dump.backwards)}
        # A later factor below 1 may be gradient clipping.
        factors = [loss * later] + ([loss] if later < 1 else [])
        twice = [
            own
            for own in factors
            if any(_is_near(own, each / num_ranks) for each in per_step)
            and not any(_is_near(own, each) for each in per_step)
        ]
        if num_ranks == 1 or not twice:
            return equal
        own, place = twice[0], dump.backwards[0].place if loss != 1 else ""
        return StepStatus.DIFFERENT, StepFault.DIVIDED_TWICE, None, (), place, own


def _change_after_backward(dump: StepDump) -> float | None:
    """The factor by which all gradients changed between backward and update; None: none."""
    changes = [
        each.change_after_backward
        for each in dump.parameters
        if each.unit is not None and each.change_after_backward is not None
    ]
    if not changes or not all(_is_near(each, changes[0]) for each in changes):
        return None
    return changes[0]


# --- forward


def _find_stale(
    sharded: Sequence[StepDump], whole: Sequence[StepDump]
) -> tuple[str, tuple[int, ...]] | None:
    """The first parameter that a forward used with values other than its shards, and the ranks."""
    places: dict[int, tuple[int, str]] = {}
    for one, other in zip(sharded, whole, strict=True):
        taken = {name: at for at, (name, _) in enumerate(other.taken)}
        used, expected = one.fingerprints("used"), other.fingerprints("taken")
        for at, (name, _) in enumerate(one.used):
            if name in taken and not _is_same_print(used[at], expected[taken[name]], 0.0):
                places[one.rank] = (at, name)
                break
    return _earliest(places)


def _first_other(
    first: Sequence[StepDump], second: Sequence[StepDump], kind: str, tolerance: float
) -> tuple[str, tuple[int, ...]] | None:
    """The first output that differs, or the first differing gradient that enters a model."""
    places: dict[int, tuple[int, str]] = {}
    for one, other in zip(first, second, strict=True):
        keys = [each.outputs if kind == "outputs" else each.entered for each in (one, other)]
        theirs = {key: at for at, key in enumerate(keys[1])}
        left, right = one.fingerprints(kind), other.fingerprints(kind)
        for at, key in enumerate(keys[0]):
            if key in theirs and not _is_same_print(left[at], right[theirs[key]], tolerance):
                places[one.rank] = (at, key[0])
                break
    return _earliest(places)


def _earliest(places: Mapping[int, tuple[int, str]]) -> tuple[str, tuple[int, ...]] | None:
    """The earliest place, and the ranks that are there."""
    if not places:
        return None
    first = min(places.values())
    return first[1], tuple(rank for rank, place in places.items() if place == first)


def _is_same_print(left: Array, right: Array, tolerance: float) -> bool:
    if np.array_equal(left[2:], right[2:], equal_nan=True):
        return True
    if tolerance == 0:
        return False
    distance = float(np.linalg.norm(left[2:] - right[2:]))
    scale = max(float(np.linalg.norm(left[2:])), float(np.linalg.norm(right[2:])))
    return distance <= tolerance * scale  # False for values that are not finite


# --- gradients


def _compare_units(
    sharded: Sequence[StepDump], whole: Sequence[StepDump], repeat: Sequence[StepDump]
) -> Iterable[UnitGradients]:
    """Compare the gradients of the units in the order of backward, then those of no unit."""
    dump = sharded[0]
    used = {name: at for at, (name, _) in enumerate(dump.used)}
    members: dict[str | None, list[DumpedParameter]] = {}
    for parameter in dump.parameters:
        if parameter.is_trained:
            members.setdefault(parameter.unit, []).append(parameter)
    settings = {each.name: each for each in dump.units}

    def last_use(unit: str | None) -> tuple[bool, int]:
        return unit is None, -max((used.get(each.name, -1) for each in members[unit]), default=0)

    for unit in sorted(members, key=last_use):
        own = settings.get(unit or "") if unit is not None else None
        compared = [
            found
            for parameter in members[unit]
            if (found := _compare_parameter(parameter, own, sharded, whole, repeat)) is not None
        ]
        if compared:
            yield _join(unit, own, compared)


@dataclass(frozen=True, slots=True)
class _Compared:
    """The gradient of one parameter in both runs, as norms of whole tensors."""

    name: str
    error: float
    tolerance: float
    norm: float
    factor: float | None
    fault: StepFault | None
    lost_dtype: str = ""


def _compare_parameter(
    parameter: DumpedParameter,
    unit: DumpedUnit | None,
    sharded: Sequence[StepDump],
    whole: Sequence[StepDump],
    repeat: Sequence[StepDump],
) -> _Compared | None:
    """Compare one parameter; None: no rank has a gradient, or parts are missing."""
    name = parameter.name
    expected, locals_ = _mean_gradient(name, whole)
    parts = _parts(name, sharded)
    if expected is None:
        return None
    norm = float(np.linalg.norm(expected))
    if not parts:
        return _Compared(name, norm, 0.0, norm, None, StepFault.MISSING_GRADIENT)
    found = assemble(parts, parameter.shape)
    if found is None:
        return None
    found = found / _later_factor(parameter, sharded)
    error = float(np.linalg.norm(found - expected))
    mean_norm = math.fsum(float(np.linalg.norm(each)) for _, each in locals_) / len(locals_)
    tolerance = _tolerance(parameter, unit, len(whole), len(sharded[0].backwards)) * mean_norm
    if repeat:
        again = assemble(_parts(name, repeat), parameter.shape)
        if again is not None:
            tolerance = max(tolerance, 3 * float(np.linalg.norm(found - again)))
    lost = _lost_dtype(parameter, unit, found, expected)
    if lost:
        fault = StepFault.LOST_PRECISION
        return _Compared(name, error, tolerance, norm, None, fault, lost)
    if error <= tolerance and not _is_divided(parts, tolerance):
        return _Compared(name, error, tolerance, norm, None, None)
    both = _Gradients(parts, found, locals_, expected)
    fault, factor = both.explain(tolerance)
    return _Compared(name, error, tolerance, norm, factor, fault)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The gradient of one parameter in both runs."""

    parts: Sequence[tuple[DumpedParameter, Array]]
    """Parts of the sharded run's gradient, by rank."""
    found: Array
    """The sharded run's gradient, assembled from the parts."""
    locals_: Sequence[tuple[DumpedParameter, Array]]
    """Gradients without sharding, by rank."""
    expected: Array
    """The mean of `locals_`."""

    def explain(self, tolerance: float) -> tuple[StepFault, float | None]:
        """The fault that explains a difference, and its factor."""
        num_own = _count_own(self.parts, self.locals_, tolerance) if len(self.locals_) > 1 else 0
        if num_own > 1 or _is_divided(self.parts, tolerance):
            return StepFault.NOT_REDUCED, None
        factor = _factor(self.found, self.expected)
        if factor is not None:
            rest = float(np.linalg.norm(self.found - factor * self.expected))
            if rest <= tolerance * max(abs(factor), 1.0):
                return StepFault.SCALED, factor
        if num_own and self.found.size >= _MIN_VALUES:  # one rank owns the whole gradient
            return StepFault.NOT_REDUCED, None
        return StepFault.OTHER_GRADIENT, None


def _lost_dtype(
    parameter: DumpedParameter, unit: DumpedUnit | None, found: Array, expected: Array
) -> str:
    """The narrower dtype that only the sharded gradient fits; empty: none, or it is declared."""
    declared = {parameter.dtype, unit.reduce_dtype if unit is not None else parameter.dtype}
    if declared != {"float32"} or found.size < _MIN_VALUES:
        return ""
    narrow = narrower_dtype(found)
    if unit is not None and unit.param_dtype in _ROUNDOFF and unit.param_dtype != "float32":
        # Few sums of 16-bit values can fit the other dtype of 16 bits by chance.
        narrow = narrow if narrow == unit.param_dtype else ""
    return narrow if narrow and not narrower_dtype(expected.astype(np.float32)) else ""


def _join(unit: str | None, own: DumpedUnit | None, compared: Sequence[_Compared]) -> UnitGradients:
    worst = max(compared, key=lambda each: (each.fault is not None, _excess(each)))
    norm = _root_sum(each.norm for each in compared)
    return UnitGradients(
        unit=unit,
        parameters=tuple(each.name for each in compared),
        gradient_norm=norm,
        error_ratio=_ratio(_root_sum(each.error for each in compared), norm),
        tolerance_ratio=_ratio(_root_sum(each.tolerance for each in compared), norm),
        factor=worst.factor,
        fault=worst.fault,
        worst_parameter=worst.name,
        param_dtype=own.param_dtype if own is not None else "",
        reduce_dtype=own.reduce_dtype if own is not None else "",
        lost_dtype=worst.lost_dtype,
    )


def _mean_gradient(
    name: str, dumps: Sequence[StepDump]
) -> tuple[Array | None, list[tuple[DumpedParameter, Array]]]:
    """The mean of the ranks' own gradients, and these gradients; None: no rank has one.

    With tensor parallelism, ranks have parts. The mean of each part is over the ranks that have it.
    """
    own = _parts(name, dumps)
    if not own:
        return None, []
    shape = own[0][0].shape
    count = np.zeros(shape)
    for dump in dumps:
        at = _index(dump, name)
        if at is not None:
            count[slices_of(dump.parameters[at])] += 1  # zeros for ranks without a gradient
    total = np.zeros(shape)
    for parameter, values in own:
        total[slices_of(parameter)] += values
    return total / np.maximum(count, 1), own


def _parts(name: str, dumps: Sequence[StepDump]) -> list[tuple[DumpedParameter, Array]]:
    found = [(dump, _index(dump, name)) for dump in dumps]
    return [
        (dump.parameters[at], dump.gradient(at))
        for dump, at in found
        if at is not None and dump.parameters[at].has_gradient
    ]


def _index(dump: StepDump, name: str) -> int | None:
    return next((at for at, each in enumerate(dump.parameters) if each.name == name), None)


def _later_factor(parameter: DumpedParameter, sharded: Sequence[StepDump]) -> float:
    """The factor by which the script changed the dumped gradient after the backward.

    For a unit it is 1. Gradients of no unit are dumped at the update, because the script may reduce
    them itself.
    """
    if parameter.unit is not None:
        return 1.0
    return _change_after_backward(sharded[0]) or 1.0


def _tolerance(
    parameter: DumpedParameter, unit: DumpedUnit | None, num_ranks: int, num_backwards: int
) -> float:
    """The tolerance, relative to the mean norm of the ranks' gradients; see [Note: Tolerance]."""
    compute = _roundoff(unit.param_dtype if unit is not None else parameter.dtype)
    reduce = _roundoff(unit.reduce_dtype if unit is not None else parameter.dtype)
    compute = 2 * max(num_backwards, 1) * max(compute, _LEAST_ROUNDOFF)
    return compute + num_ranks * reduce + _roundoff(parameter.dtype)


def _roundoff(dtype: str) -> float:
    return max(_ROUNDOFF.get(each, _OTHER_ROUNDOFF) for each in dtype.split(", "))


def _roundoffs(units: Sequence[DumpedUnit]) -> list[float]:
    return [max(_roundoff(each.param_dtype), _LEAST_ROUNDOFF) for each in units]


def _is_divided(parts: Sequence[tuple[DumpedParameter, Array]], tolerance: float) -> bool:
    """Whether ranks that hold the same part have different gradients for it."""
    seen: dict[tuple[int, ...], Array] = {}
    for parameter, values in parts:
        first = seen.setdefault(parameter.offset, values)
        if first.shape == values.shape and float(np.linalg.norm(first - values)) > tolerance:
            return True
    return False


def _count_own(
    parts: Sequence[tuple[DumpedParameter, Array]],
    locals_: Sequence[tuple[DumpedParameter, Array]],
    tolerance: float,
) -> int:
    """The number of ranks whose part is a multiple of their own gradient; 0 if one's is not."""
    known = 0
    for (parameter, values), (_, own) in zip(parts, locals_, strict=False):
        mine = own[slices_of(parameter)] if own.shape == parameter.shape else own
        factor = _factor(values, mine) if mine.shape == values.shape and values.size else None
        if factor is None:
            continue
        known += 1
        if float(np.linalg.norm(values - factor * mine)) > tolerance * max(abs(factor), 1.0):
            return 0
    return known


def _factor(found: Array, expected: Array) -> float | None:
    """The best factor by least squares; None: no factor fits."""
    square = float(np.vdot(expected, expected))
    if square == 0 or not math.isfinite(square):
        return None
    factor = float(np.vdot(expected, found)) / square
    return factor if factor and math.isfinite(factor) else None


def _is_deterministic(first: Sequence[StepDump], second: Sequence[StepDump]) -> bool:
    for one, other in zip(first, second, strict=True):
        for at, parameter in enumerate(one.parameters):
            if parameter.has_gradient and not np.array_equal(one.gradient(at), other.gradient(at)):
                return False
    return True


def _unit_of(dump: StepDump, parameter: str) -> str | None:
    found: Mapping[str, str | None] = {each.name: each.unit for each in dump.parameters}
    return found.get(parameter, parameter)


def _excess(compared: _Compared) -> float:
    return compared.error / compared.tolerance if compared.tolerance else math.inf


def _root_sum(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(each * each for each in values))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def _is_near(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=_SAME_FACTOR)


Equivalence.TABLE = TableSpec(
    "Gradients by unit, in the order of backward",
    (
        unit_column("The FSDP unit", lambda row: format_owner(row.unit)),
        value_column(
            "gradient_norm",
            MetricUnit.NUMBER,
            "Norm of the gradient without sharding, the mean over ranks",
            label="gradient",
        ),
        value_column(
            "error_ratio",
            MetricUnit.NUMBER,
            "Norm of the difference / norm of the gradient without sharding",
            label="error",
        ),
        value_column(
            "tolerance_ratio",
            MetricUnit.NUMBER,
            "The largest error that rounding in the declared dtypes explains",
            label="tolerance",
        ),
        text_column("reduce_dtype", "Dtype of the reduction", label="reduction"),
        text_column("fault", "What is wrong; empty: equal within the tolerance", label="fault"),
    ),
)
