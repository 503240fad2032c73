"""Find the likely causes of more memory or time: differences of the observed plan, then of numbers.

A difference of the observed plan is the first suspect, since the plan shows the effect of the
code's `fully_shard` calls. Only possible causes are named: a unit that keeps less unsharded does
not add memory, and a unit that keeps more does not add time.
"""

from collections.abc import Iterator, Sequence

from fsdp_inspect.checks.increases import Increase, abbreviate_units
from fsdp_inspect.comparison.settings import compare_settings
from fsdp_inspect.formatting import format_bytes, format_unit
from fsdp_inspect.predictions.comparability import decides_shape
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.run import RunManifest, Unit

_PLAN_OF_THE_WHOLE = ("forward_prefetch", "backward_prefetch", "checkpointing", "accumulation")
_KEEPS = (
    "{what} of {where} stay allocated: look for tensors that outlive their use (a list, a hook, "
    "an attribute, a graph that is not freed)"
)
_BY_CATEGORY = {
    "activation": _KEEPS.format(what="activations", where="{where}"),
    "temporary": _KEEPS.format(what="temporaries", where="{where}"),
    "optimizer_state": "the optimizer state of {where} is {ratio} as large per parameter: "
    "another optimizer, or another dtype of its state",
    "sharded_gradient": "gradients of {where} stay allocated: zero_grad(set_to_none=True) frees "
    "them",
    "sharded_parameter": "the parameters of {where} are {ratio} as large: more parameters, or "
    "another dtype",
    "input": "the batch is larger, or an earlier batch is still referenced",
}


def find_causes(
    before: RunManifest,
    after: RunManifest,
    growth: Sequence[Increase],
    *,
    of_memory: bool,
    of_time: bool,
) -> Iterator[str]:
    """The likely causes, one sentence each, best evidence first.

    Args:
        before: The settings of the baseline.
        after: The settings of the run.
        growth: Increases of memory, largest first.
        of_memory: Whether memory exceeds its limit.
        of_time: Whether a time exceeds its limit.
    """
    was = {unit.fqn: unit for unit in before.units}
    shared = [unit for unit in after.units if unit.fqn in was]
    found = [
        *_regrouped(before.units, after.units),
        *(_kept_longer(was, shared) if of_memory else ()),
        *(_gathered_again(was, shared) if of_time else ()),
        *_dtypes(was, shared, of_time=of_time),
        *_whole_plan(before, after),
        *_sizes(before, after),
    ]
    yield from found
    if not found:
        yield from _from_numbers(growth)


def _regrouped(before: Sequence[Unit], after: Sequence[Unit]) -> Iterator[str]:
    known, now = {unit.fqn for unit in before}, {unit.fqn for unit in after}
    gone = [unit for unit in before if unit.fqn not in now]
    if not gone or len(before) == len(after):
        return  # at most renamed
    larger = [
        (unit, old)
        for unit in after
        for old in before
        if unit.fqn == old.fqn and unit.num_parameters > old.num_parameters
    ]
    names = abbreviate_units([format_unit(unit.fqn) for unit in gone])
    for unit, old in larger:
        yield (
            f"`{names}` {'is no longer a unit' if len(gone) == 1 else 'are no longer units'}, and "
            f"`{format_unit(unit.fqn)}` holds {'its' if len(gone) == 1 else 'their'} parameters: "
            f"it unshards {format_bytes(unit.unsharded_bytes)} instead of "
            f"{format_bytes(old.unsharded_bytes)}"
        )
    if not larger:
        new = [format_unit(unit.fqn) for unit in after if unit.fqn not in known]
        yield f"the units changed: `{names}` became `{abbreviate_units(new) or 'none'}`"


def _kept_longer(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[str]:
    """Units that keep more between forward and backward than in the baseline."""
    for now, units in _resharding(was, shared, keeps_more=True).items():
        names = abbreviate_units([format_unit(unit.fqn) for unit in units])
        number, noun = len(units), "block" if len(units) == 1 else "blocks"
        if now is False:
            held = format_bytes(sum(unit.unsharded_bytes for unit in units))
            yield (
                f"`{names}` now reshard_after_forward=False: +{number} unsharded {noun} ({held}) "
                "between forward and backward"
            )
        else:
            yield (
                f"`{names}` now reshard_after_forward={now}: {number} {noun} sharded over only "
                f"{now} ranks between forward and backward"
            )


def _gathered_again(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[str]:
    """Units of which backward gathers more than in the baseline."""
    for now, units in _resharding(was, shared, keeps_more=False).items():
        names = abbreviate_units([format_unit(unit.fqn) for unit in units])
        held = format_bytes(sum(unit.unsharded_bytes for unit in units))
        yield (
            f"`{names}` now reshard_after_forward={now}: backward gathers "
            f"{'it' if len(units) == 1 else 'them'} again ({held})"
        )


def _resharding(
    was: dict[str, Unit], shared: Sequence[Unit], *, keeps_more: bool
) -> dict[bool | int, list[Unit]]:
    """The units that keep more (or less) after forward than before, by their new setting."""
    changed: dict[bool | int, list[Unit]] = {}
    for unit in shared:
        old, now = was[unit.fqn].reshard_after_forward, unit.reshard_after_forward
        if old is None or now is None or _kept(old) == _kept(now):
            continue
        if (_kept(now) > _kept(old)) is keeps_more:
            changed.setdefault(now, []).append(unit)
    return changed


def _kept(reshard_after_forward: bool | int) -> float:
    """The fraction of a unit that stays after forward: none, a part, or all of it."""
    if isinstance(reshard_after_forward, bool):
        return 0.0 if reshard_after_forward else 1.0
    return 1 / reshard_after_forward


def _dtypes(was: dict[str, Unit], shared: Sequence[Unit], *, of_time: bool) -> Iterator[str]:
    """Changed dtypes; a narrower dtype can only explain time."""
    for name, what in (("param_dtype", "all-gathers"), ("reduce_dtype", "gradient reduction")):
        changed: dict[tuple[str, str], list[str]] = {}
        for unit in shared:
            old, new = getattr(was[unit.fqn], name), getattr(unit, name)
            if old != new and (of_time or ITEMSIZE.get(new, 0) >= ITEMSIZE.get(old, 0)):
                changed.setdefault((old, new), []).append(format_unit(unit.fqn))
        for (old, new), units in changed.items():
            yield f"`{abbreviate_units(units)}` now {name}={new} instead of {old}: {what} in {new}"


def _whole_plan(before: RunManifest, after: RunManifest) -> Iterator[str]:
    for name in _PLAN_OF_THE_WHOLE:
        old, new = before.plan.get(name), after.plan.get(name)
        if old != new:
            yield f"{name} is {_short(new)} instead of {_short(old)}"


def _sizes(before: RunManifest, after: RunManifest) -> Iterator[str]:
    """Settings that decide how much is computed, and the size of the model."""
    for difference in compare_settings([before, after]):
        old, new = difference.values
        is_size = difference.group == "config" and decides_shape(difference.name)
        if is_size and old is not None and new is not None:
            yield f"{difference.name} is {_short(new)} instead of {_short(old)}"
        elif (difference.group, difference.name) == ("model", "num_parameters"):
            yield f"the model has {new:,} parameters instead of {old:,}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _from_numbers(growth: Sequence[Increase]) -> Iterator[str]:
    for one in growth[:2]:
        words = _BY_CATEGORY.get(one.category)
        if words is not None:
            ratio = f"{one.after / one.before:.3g} times" if one.before else "newly"
            yield words.format(where=one.where, ratio=ratio)
        elif one.category in ("all_gather_buffer", "unsharded_parameter"):
            yield f"more of {one.where} is unsharded at once: another all-gather is in flight"
