"""What do a run's units carry that they need not? Told from the manifest alone, without events.

Rule ids are those of the tuning rules: R14 full-precision gathers, R27 tied weights, R30 padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_inspect.formatting import format_bytes, format_ratio
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.run import RunManifest, Unit

PADDING_RATIO = 0.01
"""Padding below this share of a unit's gathers is not worth naming (R30)."""

_HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """Something to know about how a plan runs."""

    rule: str
    """The tuning rule that it concerns; empty if none."""
    fqns: tuple[str, ...]
    """The units; empty: the run as a whole."""
    is_contradiction: bool
    """The run did not do what its plan says; otherwise it did, at a price."""
    sentence: str
    """With units: what is true of each of them. Without: a whole sentence."""


def find_waste(manifest: RunManifest) -> Iterator[PlanFinding]:
    """What the units carry in vain: padding, full precision beside half, parameters twice."""
    yield from _padding(manifest)
    yield from _full_precision(manifest)
    yield from _tied(manifest)


def padding_bytes(unit: Unit) -> int:
    """Bytes of each gather that are no parameter: every tensor's first dimension is padded.

    0 where the sizes are not known.
    """
    size = ITEMSIZE.get(unit.param_dtype)
    if size is None or not unit.unsharded_bytes or not unit.num_parameters:
        return 0
    return max(unit.unsharded_bytes - size * unit.num_parameters, 0)


def _padding(manifest: RunManifest) -> Iterator[PlanFinding]:
    for unit in manifest.units:
        wasted = padding_bytes(unit)
        if wasted and wasted / unit.unsharded_bytes > PADDING_RATIO:
            share = format_ratio(wasted / unit.unsharded_bytes)
            yield PlanFinding(
                "R30",
                (unit.fqn,),
                False,
                f"{share} of each all-gather ({format_bytes(wasted)}) is padding: the first "
                "dimension of its tensors is not a multiple of the ranks that shard",
            )


def _full_precision(manifest: RunManifest) -> Iterator[PlanFinding]:
    """Units that gather in float32 while others gather in half of that."""
    dtypes = {unit.param_dtype for unit in manifest.units}
    if "float32" in dtypes and dtypes.intersection(_HALF):
        full = [unit.fqn for unit in manifest.units if unit.param_dtype == "float32"]
        yield PlanFinding(
            "R14",
            tuple(full),
            False,
            "gathers in float32 while other units gather in 16 bits: MixedPrecisionPolicy("
            "param_dtype) halves its messages",
        )


def _tied(manifest: RunManifest) -> Iterator[PlanFinding]:
    """Units that hold one and the same parameter: the units hold more than the model has."""
    surplus = sum(unit.num_parameters for unit in manifest.units) - manifest.model.num_parameters
    if surplus <= 0 or not manifest.model.num_parameters:
        return
    twins = [
        (first.fqn, second.fqn)
        for position, first in enumerate(manifest.units)
        for second in manifest.units[position + 1 :]
        if _is_single(first, surplus) and _is_single(second, surplus)
    ]
    yield PlanFinding(
        "R27",
        twins[0] if twins else (),
        False,
        "holds the same tied parameter as the other, and both gather it: put tied weights into "
        "one unit"
        if twins
        else f"The units hold {surplus} parameters more than the model has: tied weights that are "
        "gathered twice. Put them into one unit.",
    )


def _is_single(unit: Unit, num_parameters: int) -> bool:
    return unit.num_tensors == 1 and unit.num_parameters == num_parameters
