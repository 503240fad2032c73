"""What most likely made memory or time grow? Differences of the observed plan, then of the numbers.

A plan that differs though nobody changed its settings is the first suspect: it is what the code
really did with `fully_shard`. Only what can have done it is named: a unit that keeps less unsharded
is no reason for memory, and one that keeps more is none for time.
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
    "something keeps {what} of {where}: look for tensors that outlive their use (a list, a hook, "
    "an attribute, a graph that is not freed)"
)
_BY_CATEGORY = {
    "activation": _KEEPS.format(what="activations", where="{where}"),
    "temporary": _KEEPS.format(what="temporaries", where="{where}"),
    "optimizer_state": "the optimizer keeps {ratio} as much for each parameter of {where}: "
    "another optimizer, or another dtype of its state",
    "sharded_gradient": "gradients of {where} stay allocated: zero_grad(set_to_none=True) frees "
    "them",
    "sharded_parameter": "the parameters of {where} take {ratio} as much: more of them, or "
    "another dtype",
    "input": "the batch is larger, or an earlier one is still referenced",
}


def find_causes(
    before: RunManifest,
    after: RunManifest,
    growth: Sequence[Increase],
    *,
    of_memory: bool,
    of_time: bool,
) -> Iterator[str]:
    """The likeliest causes, one sentence each, best evidence first.

    Args:
        before: The settings of the baseline.
        after: Those of the run.
        growth: What grew in memory, largest first.
        of_memory: Whether memory grew beyond its limit.
        of_time: Whether a time did.
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
        return  # renamed at most
    larger = [
        (unit, old)
        for unit in after
        for old in before
        if unit.fqn == old.fqn and unit.num_parameters > old.num_parameters
    ]
    names = abbreviate_units([format_unit(unit.fqn) for unit in gone])
    for unit, old in larger:
        yield (
            f"`{names}` {'is no unit' if len(gone) == 1 else 'are no units'} any more; "
            f"`{format_unit(unit.fqn)}` holds {'its' if len(gone) == 1 else 'their'} parameters: "
            f"it unshards {format_bytes(unit.unsharded_bytes)} instead of "
            f"{format_bytes(old.unsharded_bytes)}"
        )
    if not larger:
        new = [format_unit(unit.fqn) for unit in after if unit.fqn not in known]
        yield f"the units are others: `{names}` became `{abbreviate_units(new) or 'none'}`"


def _kept_longer(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[str]:
    """Units that keep more between forward and backward than they did."""
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
                f"`{names}` now reshard_after_forward={now}: {number} {noun} sharded over {now} "
                "ranks only, between forward and backward"
            )


def _gathered_again(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[str]:
    """Units that backward has to gather more of than it did."""
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
    """The units that keep more after forward (or less) than they did, by what they do now."""
    changed: dict[bool | int, list[Unit]] = {}
    for unit in shared:
        old, now = was[unit.fqn].reshard_after_forward, unit.reshard_after_forward
        if old is None or now is None or _kept(old) == _kept(now):
            continue
        if (_kept(now) > _kept(old)) is keeps_more:
            changed.setdefault(now, []).append(unit)
    return changed


def _kept(reshard_after_forward: bool | int) -> float:
    """The share of a unit that stays after forward, for comparing: none, a part, all of it."""
    if isinstance(reshard_after_forward, bool):
        return 0.0 if reshard_after_forward else 1.0
    return 1 / reshard_after_forward


def _dtypes(was: dict[str, Unit], shared: Sequence[Unit], *, of_time: bool) -> Iterator[str]:
    """Other dtypes; narrower ones can only be a reason for time."""
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
    """Settings that say how much is computed, and the size of the model itself."""
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
            ratio = f"{one.after / one.before:.3g} times" if one.before else "anew"
            yield words.format(where=one.where, ratio=ratio)
        elif one.category in ("all_gather_buffer", "unsharded_parameter"):
            yield f"more of {one.where} is unsharded at once: another gather is in flight"
