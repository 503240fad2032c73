"""Find waste in a run's units from the manifest alone, without events.

The rules are R14 (full-precision all-gathers), R27 (tied weights) and R30 (padding).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_inspect.formatting import format_bytes, format_ratio
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.run import RunManifest, Unit

PADDING_RATIO = 0.01
"""Padding below this fraction of a unit's all-gather is not reported (R30)."""
FULL_PRECISION_RATIO = 0.02
"""Units in float32 below this fraction of all gathered bytes are not reported (R14)."""

_HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """A contradiction between a run and its plan, or a waste of the plan."""

    rule: str
    """The id of the tuning rule; empty if there is none."""
    fqns: tuple[str, ...]
    """The units; empty: the whole run."""
    is_contradiction: bool
    """Whether the run contradicts its plan. If it does not, the plan is wasteful."""
    sentence: str
    """A predicate that holds for each unit, or a whole sentence if there are no units."""
    is_normal: bool = False
    """Whether the finding is normal in torch and needs no action."""


def find_waste(manifest: RunManifest) -> Iterator[PlanFinding]:
    """Find padding, units that gather in full precision, and parameters that two units hold."""
    yield from _padding(manifest)
    yield from _full_precision(manifest)
    yield from _tied(manifest)


def padding_bytes(unit: Unit) -> int:
    """Return the padding in each all-gather, in bytes; 0 if the sizes are unknown.

    FSDP pads the sharded dimension of every tensor, by default the first one.
    """
    numels = {name: math.prod(shape) for name, shape in unit.parameters.items()}
    own = [
        numel * ITEMSIZE.get(unit.traits_of(name).gathered_dtype, 0)
        for name, numel in numels.items()
    ]
    if not unit.traits:  # also without recorded shapes
        own = [unit.num_parameters * ITEMSIZE.get(unit.param_dtype, 0)]
    is_known = all(own) and bool(unit.unsharded_bytes)
    return max(unit.unsharded_bytes - sum(own), 0) if is_known else 0


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
                "dimension of its tensors is not a multiple of the number of shards",
            )


def _full_precision(manifest: RunManifest) -> Iterator[PlanFinding]:
    """Find units that gather in float32 while other units gather in 16 bits.

    Small messages are no waste: many recipes keep norms in float32.
    """
    dtypes = {unit.param_dtype for unit in manifest.units}
    full = [unit for unit in manifest.units if unit.param_dtype == "float32"]
    total = sum(unit.unsharded_bytes for unit in manifest.units)
    is_much = sum(unit.unsharded_bytes for unit in full) >= FULL_PRECISION_RATIO * total
    if full and is_much and dtypes.intersection(_HALF):
        yield PlanFinding(
            "R14",
            tuple(unit.fqn for unit in full),
            False,
            "gathers in float32 while other units gather in 16 bits: MixedPrecisionPolicy("
            "param_dtype) halves its messages",
        )


def _tied(manifest: RunManifest) -> Iterator[PlanFinding]:
    """Find two units that hold the same parameter, so that the units hold more than the model."""
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
        "holds the same tied parameter as the other unit, and both gather it: put tied weights "
        "into one unit"
        if twins
        else f"The units hold {surplus} more parameters than the model: tied weights are gathered "
        "twice. Put them into one unit.",
    )


def _is_single(unit: Unit, num_parameters: int) -> bool:
    return unit.num_tensors == 1 and unit.num_parameters == num_parameters
