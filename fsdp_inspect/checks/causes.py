"""What most likely made memory or time grow? Differences of the observed plan, then of the numbers.

A plan that differs though nobody changed its settings is the first suspect: it is what the code
really did with `fully_shard`.
"""

from collections.abc import Iterator, Sequence

from fsdp_inspect.checks.blame import Growth, name_units
from fsdp_inspect.formatting import format_bytes, format_unit
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


def find_causes(before: RunManifest, after: RunManifest, growth: Sequence[Growth]) -> Iterator[str]:
    """The likeliest causes, one sentence each, best evidence first.

    Args:
        before: The settings of the baseline.
        after: Those of the run.
        growth: What grew at the peak, largest first.
    """
    was = {unit.fqn: unit for unit in before.units}
    shared = [unit for unit in after.units if unit.fqn in was]
    found = [
        *_regrouped(before.units, after.units),
        *_resharding(was, shared),
        *_dtypes(was, shared),
        *_whole_plan(before, after),
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
    names = name_units([format_unit(unit.fqn) for unit in gone])
    for unit, old in larger:
        yield (
            f"`{names}` {'is no unit' if len(gone) == 1 else 'are no units'} any more; "
            f"`{format_unit(unit.fqn)}` holds their parameters: it unshards "
            f"{format_bytes(unit.unsharded_bytes)} instead of {format_bytes(old.unsharded_bytes)}"
        )
    if not larger:
        new = [format_unit(unit.fqn) for unit in after if unit.fqn not in known]
        yield f"the units are others: `{names}` became `{name_units(new) or 'none'}`"


def _resharding(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[str]:
    changed: dict[tuple[object, object], list[Unit]] = {}
    for unit in shared:
        old = was[unit.fqn].reshard_after_forward
        if old != unit.reshard_after_forward:
            changed.setdefault((old, unit.reshard_after_forward), []).append(unit)
    for (_, now), units in changed.items():
        names = name_units([format_unit(unit.fqn) for unit in units])
        sign = "+" if now is False else "-"
        noun = "block" if len(units) == 1 else "blocks"
        held = format_bytes(sum(unit.unsharded_bytes for unit in units))
        yield (
            f"`{names}` now reshard_after_forward={now}: {sign}{len(units)} unsharded {noun} "
            f"({held}) between forward and backward"
        )


def _dtypes(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[str]:
    for name, what in (("param_dtype", "all-gathers"), ("reduce_dtype", "gradient reduction")):
        changed: dict[tuple[str, str], list[str]] = {}
        for unit in shared:
            pair = (getattr(was[unit.fqn], name), getattr(unit, name))
            if pair[0] != pair[1]:
                changed.setdefault(pair, []).append(format_unit(unit.fqn))
        for (old, new), units in changed.items():
            yield f"`{name_units(units)}` now {name}={new} instead of {old}: {what} in {new}"


def _whole_plan(before: RunManifest, after: RunManifest) -> Iterator[str]:
    for name in _PLAN_OF_THE_WHOLE:
        old, new = before.plan.get(name), after.plan.get(name)
        if old != new:
            yield f"{name} is {_short(new)} instead of {_short(old)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _from_numbers(growth: Sequence[Growth]) -> Iterator[str]:
    for one in growth[:2]:
        words = _BY_CATEGORY.get(one.category)
        if words is not None:
            ratio = f"{one.after / one.before:.3g} times" if one.before else "anew"
            yield words.format(where=one.where, ratio=ratio)
        elif one.category in ("all_gather_buffer", "unsharded_parameter"):
            yield f"more of {one.where} is unsharded at once: another gather is in flight"
