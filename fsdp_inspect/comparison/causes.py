"""Find the likely causes of more memory or time: changed settings that explain the increase.

A change of the observed plan is the first suspect, since the plan shows the effect of the code's
`fully_shard` calls. Then come settings of the configuration, of the model and of the loop.

[Note: explained bytes] Each setting can only raise some categories of memory, in some units, and
mostly by a limited number of bytes: a batch that is 25% larger raises activations by 25%. The
causes are stated if together they account for `EXPLAINED_RATIO` of the increase. Otherwise none is:
an unrecorded change is then at least as likely, and the output lists what grew instead.

[Note: longer parts] Each setting can lengthen some parts of the step only: a dropped prefetch
lengthens waits for all-gathers, and not forward. A cause of time is stated only if a part that it
can lengthen became longer.

[Note: moved peak] If the peak moves to another unit, the two moments hold different activations.
Their increase contains memory that did not grow. A cause with limited bytes is then compared with
the increase of the peak itself. So is a larger batch, and a unit with more parameters: before, its
memory at the new moment was smaller by its ratio, and all memory at that moment was at most the old
peak.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fsdp_inspect.comparison.increases import NO_UNIT, Increase, abbreviate_units
from fsdp_inspect.comparison.settings import compare_settings, decides_shape
from fsdp_inspect.comparison.sides import align_units
from fsdp_inspect.formatting import format_bytes, format_unit, plural
from fsdp_inspect.trace.codes import ITEMSIZE, PARTS_OF_STEP, MemoryCategory
from fsdp_inspect.trace.live_memory import RESTING
from fsdp_inspect.trace.run import RunManifest, Unit
from fsdp_inspect.trace.sharders import UNKNOWN

EXPLAINED_RATIO = 0.8
_LEAST_SHARE = 0.05
"""A setting that accounts for a smaller fraction of the increase is not named."""
_COMPUTED = ("activation", "temporary")
_UNSHARDED = ("unsharded_parameter", "all_gather_buffer")
_REDUCED = ("reduce_scatter_buffer", "unsharded_gradient", "sharded_gradient")
_FREED_IN_A_STEP = {*_COMPUTED, "all_gather_buffer", "reduce_scatter_buffer"}
"""No setting lets these outlive a step. Only code that keeps tensors does."""
_COMPUTE = ("forward", "backward")
_WAITS_OF_GATHERS = ("exposed_all_gather", "fsdp_copies", "host_bound")
_WAITS_OF_REDUCTION = (
    *("exposed_reduce_scatter", "exposed_all_reduce", "exposed_other", "fsdp_copies", "host_bound"),
)
_ANY_PART = tuple(part.label for part in PARTS_OF_STEP)
_OFFLOADED = ("sharded_parameter", "sharded_gradient", "optimizer_state", "temporary")
_ALL = tuple(category.label for category in MemoryCategory)
_RAISED_BY_MODEL: Mapping[str, Collection[str]] = {
    "num_parameters": tuple(name for name in _ALL if name != "input"),
    "dropout": _COMPUTED,
    "attention": _COMPUTED,
    "loss_dtype": _COMPUTED,
    "gradient_sync": _REDUCED,
    "backwards": _REDUCED,
}
_PARTS_OF_MODEL: Mapping[str, Collection[str]] = {
    "gradient_sync": _WAITS_OF_REDUCTION,
    "backwards": tuple(name for name in _ANY_PART if name != "optimizer"),
}
"""The parts of the step that they can lengthen, if not forward and backward."""
_WORDS_OF_BATCH = ("batch", "seq", "length", "tokens")
_WORDS_OF_LENGTH = ("seq", "length", "dim")
"""Attention and weights can grow with the square of these settings."""
_ROUNDING_RATIO = 0.1
"""The fraction by which memory may exceed the computed increase: padding, and a shifted peak."""
_COMPUTED_PER_PARAMETER = 2
"""If a unit has 10% more parameters, its activations may be 20% larger."""
_COUNT_OF_MODULES = re.compile(r"in (\d+) modules")
_SHAPE = re.compile(r"(\d+(?: x \d+)*) \w+")
_CALL = re.compile(r"(\w+)\((.*)\)")


@dataclass(frozen=True, slots=True)
class _Cause:
    """A changed setting."""

    sentence: str
    raises: Collection[str]
    """Categories of memory that the setting can raise; empty: it only costs time."""
    lengthens: Collection[str] = ()
    """Parts of the step that the setting can lengthen; empty: it only costs memory."""
    most_bytes: int | None = None
    """The largest possible increase of these categories together; None: unknown."""
    most_of: Callable[[Increase], float] | None = None
    """The largest possible increase of one category of one unit; None: unknown."""
    added_of: Callable[[Increase], float] | None = None
    """The bytes that the setting added to a category of one unit, at any moment; None: unknown."""


def find_causes(  # noqa: PLR0913 - the two sides, and what of them exceeds its limit
    before: RunManifest,
    after: RunManifest,
    growth: Sequence[Increase],
    *,
    of_memory: bool,
    longer: frozenset[str] | None = None,
    phase: str | None = None,
    moved_by: int | None = None,
) -> tuple[str, ...]:
    """The likely causes, one sentence each, best evidence first; empty: unknown.

    Args:
        before: The settings of the baseline.
        after: The settings of the run.
        growth: Increases of memory by category and unit.
        of_memory: Whether memory exceeds its limit.
        longer: Parts of the step that take longer, from `parts_of`; empty: a time exceeds its
            limit, and its parts are unknown; None: no time needs an explanation.
        phase: The phase whose peak increased; `resting`: after the step; None: unknown.
        moved_by: The increase of a peak that moved to another unit; None: it did not move.
    """
    rows = align_units([before.units, after.units])
    was = {unit.fqn: old[0] for old, new in (row.members for row in rows) if old for unit in new}
    shared = [unit for unit in after.units if unit.fqn in was]
    found = [
        *_sharded(before, after),
        *_regrouped(before.units, after.units),
        *_kept_longer(was, shared),
        *_gathered_again(was, shared),
        *_dtypes(was, shared),
        *_prefetched(before, after, phase),
        *_checkpointed(before, after),
        *_sizes(before, after, phase),
        *_inputs(before, after),
    ]
    if phase == RESTING:
        found = [replace(cause, raises=set(cause.raises) - _FREED_IN_A_STEP) for cause in found]
    of_bytes = _explaining(found, growth, moved_by) if of_memory else []
    of_time = [] if longer is None else [cause for cause in found if _lengthens(cause, longer)]
    return tuple(dict.fromkeys(cause.sentence for cause in (*of_bytes, *of_time)))


def parts_of(longer: Sequence[Increase]) -> frozenset[str]:
    """The parts of the step among increases of time; a wait of a collective counts as its part."""
    names = [one.category.partition(" in ")[0] for one in longer]
    return frozenset(name if name in _ANY_PART else f"exposed_{name}" for name in names)


def _lengthens(cause: _Cause, longer: frozenset[str]) -> bool:
    """Whether a cause can lengthen one of the parts. See [Note: longer parts]."""
    return bool(cause.lengthens) and (not longer or not longer.isdisjoint(cause.lengthens))


def _explaining(
    causes: Sequence[_Cause], growth: Sequence[Increase], moved_by: int | None
) -> list[_Cause]:
    """The causes that account for the increase. See [Note: explained bytes]."""
    left = [one.increase for one in growth]  # for causes with a limit first, then for the others
    total = sum(left)
    kept: list[tuple[_Cause, int]] = []
    for cause in sorted(causes, key=lambda one: one.most_of is None and one.most_bytes is None):
        most, taken = cause.most_bytes, 0
        most = None if most is None else round(most * (1 + _ROUNDING_RATIO))
        for place, one in enumerate(growth):
            if one.category not in cause.raises:
                continue
            limit = math.inf if cause.most_of is None else cause.most_of(one)
            bytes_ = round(min(left[place], limit * (1 + _ROUNDING_RATIO)))
            bytes_ = bytes_ if most is None else min(bytes_, most - taken)
            left[place] -= bytes_
            taken += bytes_
        if taken >= _LEAST_SHARE * total and taken:
            kept.append((cause, taken))
    named = sum(taken for _, taken in kept)
    if total and named >= EXPLAINED_RATIO * total:
        return sorted((cause for cause, _ in kept), key=causes.index)
    if moved_by is None:
        return []
    # See [Note: moved peak].
    limited = [(cause, taken) for cause, taken in kept if cause.most_bytes is not None]
    for cause in causes:
        if cause.added_of is not None:
            added = sum(cause.added_of(one) for one in growth if one.category in cause.raises)
            if added >= _LEAST_SHARE * moved_by:
                limited.append((cause, round(added)))
    enough = sum(taken for _, taken in limited) >= EXPLAINED_RATIO * moved_by
    return [cause for cause, _ in limited] if enough else []


def _sharded(before: RunManifest, after: RunManifest) -> Iterator[_Cause]:
    """Another mesh: other shards, and other groups that communicate."""
    old, new = (" x ".join(map(str, mesh.values())) for mesh in (before.mesh, after.mesh))
    is_other_mesh = old != new and bool(old and new)  # an import may not record it
    if not is_other_mesh and before.world_size == after.world_size:
        return
    change = f"is {new} instead of {old}"
    if before.world_size != after.world_size:
        change = f"has {after.world_size} ranks instead of {before.world_size}"
    was = {unit.fqn: unit.sharded_bytes for unit in before.units}
    ratios = {
        format_unit(unit.fqn): unit.sharded_bytes / was[unit.fqn]
        for unit in after.units
        if was.get(unit.fqn)
    }
    most = max(ratios.values(), default=1.0)
    shards = f": a shard is up to {most:.3g} times as large" if most > 1 else ""
    yield _Cause(
        f"the mesh {change}{shards}",
        _OFFLOADED if most > 1 else (),
        (*(("optimizer",) if most > 1 else ()), *_WAITS_OF_GATHERS, *_WAITS_OF_REDUCTION),
        most_of=_by_unit(ratios),
    )


def _by_unit(ratios: Mapping[str, float]) -> Callable[[Increase], float]:
    """The most by which memory may grow with its unit's ratio; memory of no unit: the highest."""
    highest = max((ratio for ratio in ratios.values() if ratio < math.inf), default=1.0)

    def most(one: Increase) -> float:
        ratio = _ratio_of_units(one, ratios, highest)
        return math.inf if ratio == math.inf else (ratio - 1) * one.before

    return most


def _ratio_of_units(one: Increase, ratios: Mapping[str, float], of_no_unit: float) -> float:
    """The lowest ratio of the units of some memory, at least 1."""
    own = (ratios.get(name, 1.0) for name in one.units if name != NO_UNIT)
    return max(min(own, default=of_no_unit), 1.0)


def _regrouped(before: Sequence[Unit], after: Sequence[Unit]) -> Iterator[_Cause]:
    known, now = {unit.fqn for unit in before}, {unit.fqn for unit in after}
    gone = [unit for unit in before if unit.fqn not in now]
    if not gone or len(before) == len(after):
        return  # the units were renamed at most
    larger = [
        (unit, old)
        for unit in after
        for old in before
        if unit.fqn == old.fqn and unit.num_parameters > old.num_parameters
    ]
    names = abbreviate_units([format_unit(unit.fqn) for unit in gone])
    for unit, old in larger:
        yield _Cause(
            f"`{names}` {'is not a unit' if len(gone) == 1 else 'are not units'}, and "
            f"`{format_unit(unit.fqn)}` holds {'its' if len(gone) == 1 else 'their'} parameters: "
            f"it unshards {format_bytes(unit.unsharded_bytes)} instead of "
            f"{format_bytes(old.unsharded_bytes)}",
            (*_UNSHARDED, *_REDUCED),
            (*_COMPUTE, *_WAITS_OF_GATHERS, *_WAITS_OF_REDUCTION),
            most_of=_within([unit]),
        )
    if not larger:
        new = [unit for unit in after if unit.fqn not in known]
        most = [max((unit.unsharded_bytes for unit in units), default=0) for units in (gone, new)]
        yield _Cause(
            f"{plural(len(gone), 'unit')} became {len(new)}, of up to {format_bytes(most[1])} "
            f"instead of {format_bytes(most[0])} unsharded",
            (*_UNSHARDED, *_REDUCED) if most[1] > most[0] else (),
            (*_COMPUTE, *_WAITS_OF_GATHERS, *_WAITS_OF_REDUCTION),
        )


def _kept_longer(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[_Cause]:
    """Units that keep more between forward and backward than in the baseline."""
    for now, units in _resharding(was, shared, keeps_more=True).items():
        most = sum(unit.unsharded_bytes for unit in units)
        if now is False:
            held = format_bytes(most)
            yield _Cause(
                f"{_have(units)} reshard_after_forward=False: +"
                f"{plural(len(units), 'unsharded block')} ({held}) between forward and backward",
                _UNSHARDED,
                most_bytes=most,
                most_of=_within(units),
            )
        else:
            yield _Cause(
                f"{_have(units)} reshard_after_forward={now}: "
                f"{plural(len(units), 'block')} sharded over only {now} ranks between forward and "
                "backward",
                (*_UNSHARDED, "sharded_parameter"),
                most_bytes=most,
                most_of=_within(units),
            )


def _within(units: Sequence[Unit]) -> Callable[[Increase], float]:
    """The most by which a category may grow: no limit inside these units, 0 outside."""
    names = {format_unit(unit.fqn) for unit in units}
    return lambda one: math.inf if names.issuperset(one.units) else 0.0


def _gathered_again(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[_Cause]:
    """Units that backward gathers more often than in the baseline, or from more ranks."""
    for now, units in _resharding(was, shared, keeps_more=False).items():
        held = format_bytes(sum(unit.unsharded_bytes for unit in units))
        yield _Cause(
            f"{_have(units)} reshard_after_forward={now}: backward gathers "
            f"{'it' if len(units) == 1 else 'them'} again ({held})",
            (),
            ("backward", *_WAITS_OF_GATHERS),
        )


def _have(units: Sequence[Unit]) -> str:
    names = abbreviate_units([format_unit(unit.fqn) for unit in units])
    return f"`{names}` {'has' if len(units) == 1 else 'have'}"


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
    """The fraction of a unit that stays unsharded after forward, 0 to 1."""
    if isinstance(reshard_after_forward, bool):
        return 0.0 if reshard_after_forward else 1.0
    return 1 / reshard_after_forward


def _dtypes(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[_Cause]:
    """Changed dtypes; a narrower dtype can only explain compute, which has other kernels."""
    for name, what, raises, waits in (
        *(("param_dtype", "all-gathers", (*_UNSHARDED, *_COMPUTED, *_REDUCED), _WAITS_OF_GATHERS),),
        *(("reduce_dtype", "gradient reduction", _REDUCED, _WAITS_OF_REDUCTION),),
    ):
        changed: dict[tuple[str, str], list[Unit]] = {}
        for unit in shared:
            old, new = getattr(was[unit.fqn], name), getattr(unit, name)
            if old != new and UNKNOWN not in (old, new):
                changed.setdefault((old, new), []).append(unit)
        for (old, new), units in changed.items():
            is_wider = ITEMSIZE.get(new, 0) >= ITEMSIZE.get(old, 0)
            yield _Cause(
                f"{_have(units)} {name}={new} instead of {old}: {what} in {new}",
                raises if is_wider else (),
                (*_COMPUTE, *waits) if is_wider else _COMPUTE,
            )


def _prefetched(before: RunManifest, after: RunManifest, phase: str | None) -> Iterator[_Cause]:
    """Deeper prefetch costs memory in its own phase only; less prefetch costs waits."""
    for name in ("forward_prefetch", "backward_prefetch"):
        old, new = before.plan.get(name), after.plan.get(name)
        is_possible = phase is None or name.startswith(phase)
        if old == new or not is_possible or not _record(name, before, after):
            continue
        was, now = _depth(old), _depth(new)
        if now > was:
            yield _Cause(f"{name} gathers {now} units ahead instead of {was}", _UNSHARDED)
        elif now < was:
            sentence = f"{name} gathers {now} units ahead instead of {was}"
            yield _Cause(sentence, (), _WAITS_OF_GATHERS)
        elif now:
            yield _Cause(f"{name} has another order", (), _WAITS_OF_GATHERS)


def _record(name: str, *sides: RunManifest) -> bool:
    """Whether all sides record a setting of the plan. An import does not."""
    return all(side.source != "imported" or side.plan.get(name) is not None for side in sides)


def _depth(prefetch: object) -> int:
    """The most units that a prefetch setting gathers ahead; 0: none is set."""
    if isinstance(prefetch, Mapping):
        lists = (names for names in prefetch.values() if isinstance(names, list | tuple))
        return max(map(len, lists), default=0)
    return prefetch if isinstance(prefetch, int) else 0


def _checkpointed(before: RunManifest, after: RunManifest) -> Iterator[_Cause]:
    """Modules that repeat less of their forward (memory), or more (time), than in the baseline."""
    if not _record("checkpointing", before, after):
        return
    was, now = (_checkpoints(each.plan.get("checkpointing")) for each in (before, after))
    less = [name for name in was if name not in now]
    partly = [name for name, kind in was.items() if kind == "full" and now.get(name, kind) != kind]
    more = [name for name, kind in now.items() if was.get(name) not in (kind, "full")]
    for changed, words, raises, lengthens in (
        (less, "not checkpointed", _COMPUTED, ()),
        (partly, "checkpointed selectively", _COMPUTED, ()),
        (more, "checkpointed: backward repeats the forward", (), ("backward", "host_bound")),
    ):
        if changed:
            names = abbreviate_units([format_unit(name) for name in changed])
            verb = "is" if len(changed) == 1 else "are"
            yield _Cause(f"`{names}` {verb} {words}", raises, lengthens)


def _checkpoints(checkpointing: object) -> dict[str, str]:
    """The kind of checkpointing (`full` or `selective`) of each module."""
    tables = checkpointing if isinstance(checkpointing, Mapping) else {}
    return {
        name: kind
        for kind, names in tables.items()
        if isinstance(names, list | tuple)
        for name in names
        if isinstance(name, str)
    }


def _sizes(before: RunManifest, after: RunManifest, phase: str | None) -> Iterator[_Cause]:
    """Settings that decide the amount of compute, and observed settings of model and loop."""
    differences = compare_settings([before, after])
    # It comes first, because it can explain all activations, of which dropout keeps a small part.
    for difference in sorted(differences, key=lambda each: each.name != "recomputation"):
        name, (old, new) = difference.name, difference.values
        if old is None or new is None or (_is_number(old) and _is_number(new) and new < old):
            continue
        sentence = f"{name} is {_short(new)} instead of {_short(old)}"
        if difference.group == "config" and decides_shape(name):
            is_batch = _is_of_batch(name)
            yield _Cause(
                sentence,
                (*_COMPUTED, "input") if is_batch else _ALL,
                (*_COMPUTE, "data", "host_bound") if is_batch else _ANY_PART,
                most_of=_in_proportion(name, old, new),
            )
        elif difference.group == "plan" and name == "offload" and new == "none":
            sentence = f"offload of {difference.where} is {new} instead of {old}"
            yield _Cause(sentence, _OFFLOADED)
        elif difference.group == "model" and name == "optimizer":
            raises = ("optimizer_state", *(("temporary",) if phase == "optimizer" else ()))
            yield _Cause(_describe_other_optimizer(str(old), str(new)), raises, ("optimizer",))
        elif difference.group == "model" and name == "recomputation":
            is_less = _count_repeated(new) < _count_repeated(old)
            longer = () if is_less else ("backward", "host_bound")
            yield _Cause(sentence, _COMPUTED if is_less else (), longer)
        elif difference.group == "model" and name == "num_parameters":
            ratios = _ratios_of_parameters(before, after)
            outside = after.num_outside_units - before.num_outside_units
            whole = f", {outside:,} more of them outside all units" if outside > 0 else ""
            yield _Cause(
                f"the model has {new:,} parameters instead of {old:,}{whole}",
                _RAISED_BY_MODEL[name],
                _ANY_PART,
                most_of=_as_parameters(before, after, ratios) if ratios else None,
                added_of=partial(_added_parameters, ratios=ratios, outside=outside),
            )
        elif (
            difference.group == "model" and name in _RAISED_BY_MODEL and _can_raise(name, old, new)
        ):
            most_of = _next_to_the_loss(after) if name == "loss_dtype" else None
            parts = _PARTS_OF_MODEL.get(name, _COMPUTE)
            yield _Cause(sentence, _RAISED_BY_MODEL[name], parts, most_of=most_of)


def _inputs(before: RunManifest, after: RunManifest) -> Iterator[_Cause]:
    """Larger inputs, unless a setting of the configuration shows them."""
    differences = compare_settings([before, after])
    if any(each.group == "config" and _is_of_batch(each.name) for each in differences):
        return
    for old, new in (each.values for each in differences if each.name == "inputs"):
        was, now = (_SHAPE.findall(str(text))[:1] for text in (old, new))
        if not (was and now):
            continue
        (was_rows, *was_rest), (now_rows, *now_rest) = (
            tuple(map(int, shape.split(" x "))) for (shape,) in (was, now)
        )
        ratio = (now_rows * math.prod(now_rest)) / max(was_rows * math.prod(was_rest), 1)
        if ratio <= 1:
            continue
        is_batch = was_rest == now_rest
        yield _Cause(
            f"the {'batch' if is_batch else 'inputs'} grew: the model receives {_short(new)} "
            f"instead of {_short(old)}",
            (*_COMPUTED, "input"),
            (*_COMPUTE, "data", "host_bound"),
            most_of=_growing_by(ratio if is_batch else ratio**2),
            added_of=_added_batch(ratio) if is_batch else None,
        )


def _added_batch(ratio: float) -> Callable[[Increase], float]:
    return lambda one: one.after * (1 - 1 / ratio)


def _growing_by(ratio: float) -> Callable[[Increase], float]:
    return lambda one: (ratio - 1) * one.before


def _is_of_batch(name: str) -> bool:
    return decides_shape(name) and any(word in name.lower() for word in _WORDS_OF_BATCH)


def _in_proportion(name: str, old: object, new: object) -> Callable[[Increase], float] | None:
    """The most by which memory may grow if it is proportional to a size or to its square.

    Returns:
        None if the setting is not a size.
    """
    if not (_is_number(old) and _is_number(new)):
        return None
    was, now = float(str(old)), float(str(new))
    if was <= 0:
        return None
    power = 2 if any(word in name.lower() for word in _WORDS_OF_LENGTH) else 1
    return _growing_by((now / was) ** power)


def _ratios_of_parameters(before: RunManifest, after: RunManifest) -> dict[str, float]:
    """The parameters of each unit / those before; infinite for a new unit; empty: unknown."""
    was = {format_unit(unit.fqn): unit.num_parameters for unit in before.units}
    now = {format_unit(unit.fqn): unit.num_parameters for unit in after.units}
    if not was:
        return {}
    return {name: number / was[name] if was.get(name) else math.inf for name, number in now.items()}


def _added_parameters(one: Increase, *, ratios: Mapping[str, float], outside: int) -> float:
    """The bytes that more parameters added; what no unit computes does not follow them."""
    if NO_UNIT not in one.units:
        return one.after * (1 - 1 / _ratio_of_units(one, ratios, 1.0))
    is_copy = outside > 0 and one.category not in _COMPUTED
    return min(one.after, _bytes_outside(one, outside)) if is_copy else 0.0


def _bytes_outside(one: Increase, outside: int) -> int:
    """The most that parameters outside all units hold: float32, and up to two states."""
    return outside * ITEMSIZE["float32"] * (2 if one.category == "optimizer_state" else 1)


def _as_parameters(
    before: RunManifest, after: RunManifest, ratios: Mapping[str, float]
) -> Callable[[Increase], float]:
    """The most by which memory may grow with its unit's parameters; no limit for a new unit.

    Gradients exist for some parameters of a unit only, as backward reaches them. All that came may
    be among them, so their limit is the increase of the unsharded bytes, not their own ratio. Each
    rank has a whole copy of the parameters outside all units, in float32 at most, and up to two
    states of them.
    """
    most = _by_unit(ratios)
    was = {format_unit(unit.fqn): unit.unsharded_bytes for unit in before.units}
    came = {
        format_unit(unit.fqn): unit.unsharded_bytes - was.get(format_unit(unit.fqn), 0)
        for unit in after.units
    }

    outside = max(after.num_outside_units - before.num_outside_units, 0)

    def most_of(one: Increase) -> float:
        if outside and NO_UNIT in one.units and one.category not in _COMPUTED:
            return _bytes_outside(one, outside) + 2 * sum(came.get(name, 0) for name in one.units)
        if one.category in _COMPUTED:
            return most(one) * _COMPUTED_PER_PARAMETER
        if one.category in (*_UNSHARDED, *_REDUCED):
            return max(most(one), sum(came.get(name, 0) for name in one.units))
        return most(one)

    return most_of


def _next_to_the_loss(after: RunManifest) -> Callable[[Increase], float]:
    """The most by which memory may grow in the units that can compute the loss.

    These are no unit, the root, and the unit that ran last.
    """
    last = max(after.units, key=lambda unit: unit.execution_index, default=None)
    names = {NO_UNIT, format_unit(""), *(() if last is None else (format_unit(last.fqn),))}
    return lambda one: math.inf if names.issuperset(one.units) else 0.0


def _count_repeated(recomputation: object) -> int:
    """The repeated forwards of `3 forwards a backward`, and 0 of `none`."""
    number, _, _ = str(recomputation).partition(" ")
    return int(number) if number.isdigit() else 0


def _can_raise(name: str, old: object, new: object) -> bool:
    """Whether a change of an observed setting can increase memory."""
    if name == "dropout":  # another probability drops equally many values
        counts = [sum(map(int, _COUNT_OF_MODULES.findall(str(value)))) for value in (old, new)]
        return counts[1] > counts[0]
    if name == "backwards":
        return int(str(new).split()[0]) > int(str(old).split()[0])
    if name == "loss_dtype":
        return ITEMSIZE.get(str(new), 0) >= ITEMSIZE.get(str(old), 0)
    return True


def _describe_other_optimizer(old: str, new: str) -> str:
    """Name the arguments of an optimizer that differ, or else both optimizers."""
    was, now = _CALL.fullmatch(old), _CALL.fullmatch(new)
    if was is None or now is None or was[1] != now[1]:
        return f"optimizer is {_short(new)} instead of {_short(old)}"
    before = dict.fromkeys(was[2].split(", "))
    changed = [part for part in now[2].split(", ") if part not in before]
    return f"optimizer is {now[1]} with {', '.join(changed) or 'other settings'}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
