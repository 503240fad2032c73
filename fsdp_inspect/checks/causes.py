"""Find the likely causes of more memory or time: changed settings that explain the increase.

A change of the observed plan is the first suspect, since the plan shows the effect of the code's
`fully_shard` calls. Then come settings of the configuration, of the model and of the loop.

[Note: explained bytes] Each setting can only raise some categories of memory, and some settings
only by a known number of bytes. The causes are stated if together they account for
`EXPLAINED_RATIO` of the increase. Otherwise none is: an unrecorded change is then at least as
likely, and the output lists what grew instead.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.checks.increases import Increase, abbreviate_units
from fsdp_inspect.comparison.settings import compare_settings
from fsdp_inspect.formatting import format_bytes, format_unit
from fsdp_inspect.predictions.comparability import decides_shape
from fsdp_inspect.trace.codes import ITEMSIZE, MemoryCategory
from fsdp_inspect.trace.run import RunManifest, Unit

EXPLAINED_RATIO = 0.8
_COMPUTED = ("activation", "temporary")
_UNSHARDED = ("unsharded_parameter", "all_gather_buffer")
_REDUCED = ("reduce_scatter_buffer", "unsharded_gradient", "sharded_gradient")
_ALL = tuple(category.label for category in MemoryCategory)
_RAISED_BY_PLAN: Mapping[str, Collection[str]] = {
    "forward_prefetch": _UNSHARDED,
    "backward_prefetch": _UNSHARDED,
    "checkpointing": _COMPUTED,
    "accumulation": (*_UNSHARDED, *_REDUCED),
}
_RAISED_BY_MODEL: Mapping[str, Collection[str]] = {
    "num_parameters": tuple(name for name in _ALL if name != "input"),
    "dropout": _COMPUTED,
    "attention": _COMPUTED,
    "loss_dtype": _COMPUTED,
    "optimizer": ("optimizer_state", "temporary"),
}
_WORDS_OF_BATCH = ("batch", "seq", "length", "tokens")
_ROUNDING_RATIO = 0.1
"""A setting may raise memory by this fraction more than computed: padding, and a shifted peak."""


@dataclass(frozen=True, slots=True)
class _Cause:
    """A changed setting."""

    sentence: str
    raises: Collection[str]
    """Categories of memory that it can raise; empty: it only costs time."""
    most_bytes: int | None = None
    """The most that it can raise them by; None: unknown."""


def find_causes(
    before: RunManifest,
    after: RunManifest,
    growth: Sequence[Increase],
    *,
    of_memory: bool,
    of_time: bool,
) -> tuple[str, ...]:
    """The likely causes, one sentence each, best evidence first; empty: unknown.

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
    of_bytes = _explaining(found, growth) if of_memory else []
    timed = found if of_time else []
    return tuple(dict.fromkeys(cause.sentence for cause in (*of_bytes, *timed)))


def _explaining(causes: Sequence[_Cause], growth: Sequence[Increase]) -> list[_Cause]:
    """The causes that account for the increase. See [Note: explained bytes]."""
    grown: dict[str, int] = {}
    for one in growth:
        grown[one.category] = grown.get(one.category, 0) + one.increase
    total, kept = sum(grown.values()), []
    for cause in causes:
        possible = sum(grown.get(category, 0) for category in cause.raises)
        most = possible
        if cause.most_bytes is not None:
            most = min(possible, round(cause.most_bytes * (1 + _ROUNDING_RATIO)))
        if not possible:
            continue
        kept.append(cause)
        for category in cause.raises:
            taken = min(grown.get(category, 0), most)
            grown[category] = grown.get(category, 0) - taken
            most -= taken
    left = sum(grown.values())
    return kept if total and left <= (1 - EXPLAINED_RATIO) * total else []


def _regrouped(before: Sequence[Unit], after: Sequence[Unit]) -> Iterator[_Cause]:
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
        yield _Cause(
            f"`{names}` {'is no longer a unit' if len(gone) == 1 else 'are no longer units'}, and "
            f"`{format_unit(unit.fqn)}` holds {'its' if len(gone) == 1 else 'their'} parameters: "
            f"it unshards {format_bytes(unit.unsharded_bytes)} instead of "
            f"{format_bytes(old.unsharded_bytes)}",
            (*_UNSHARDED, *_REDUCED),
        )
    if not larger:
        new = [format_unit(unit.fqn) for unit in after if unit.fqn not in known]
        yield _Cause(
            f"the units changed: `{names}` became `{abbreviate_units(new) or 'none'}`",
            (*_UNSHARDED, *_REDUCED),
        )


def _kept_longer(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[_Cause]:
    """Units that keep more between forward and backward than in the baseline."""
    for now, units in _resharding(was, shared, keeps_more=True).items():
        names = abbreviate_units([format_unit(unit.fqn) for unit in units])
        number, noun = len(units), "block" if len(units) == 1 else "blocks"
        most = sum(unit.unsharded_bytes for unit in units)
        if now is False:
            held = format_bytes(most)
            yield _Cause(
                f"`{names}` now reshard_after_forward=False: +{number} unsharded {noun} ({held}) "
                "between forward and backward",
                _UNSHARDED,
                most,
            )
        else:
            yield _Cause(
                f"`{names}` now reshard_after_forward={now}: {number} {noun} sharded over only "
                f"{now} ranks between forward and backward",
                (*_UNSHARDED, "sharded_parameter"),
                most,
            )


def _gathered_again(was: dict[str, Unit], shared: Sequence[Unit]) -> Iterator[_Cause]:
    """Units of which backward gathers more than in the baseline."""
    for now, units in _resharding(was, shared, keeps_more=False).items():
        names = abbreviate_units([format_unit(unit.fqn) for unit in units])
        held = format_bytes(sum(unit.unsharded_bytes for unit in units))
        yield _Cause(
            f"`{names}` now reshard_after_forward={now}: backward gathers "
            f"{'it' if len(units) == 1 else 'them'} again ({held})",
            (),
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


def _dtypes(was: dict[str, Unit], shared: Sequence[Unit], *, of_time: bool) -> Iterator[_Cause]:
    """Changed dtypes; a narrower dtype can only explain time."""
    for name, what, raises in (
        ("param_dtype", "all-gathers", (*_UNSHARDED, *_COMPUTED, *_REDUCED)),
        ("reduce_dtype", "gradient reduction", _REDUCED),
    ):
        changed: dict[tuple[str, str], list[str]] = {}
        for unit in shared:
            old, new = getattr(was[unit.fqn], name), getattr(unit, name)
            if old != new and (of_time or ITEMSIZE.get(new, 0) >= ITEMSIZE.get(old, 0)):
                changed.setdefault((old, new), []).append(format_unit(unit.fqn))
        for (old, new), units in changed.items():
            sentence = f"`{abbreviate_units(units)}` now {name}={new} instead of {old}"
            yield _Cause(f"{sentence}: {what} in {new}", raises)


def _whole_plan(before: RunManifest, after: RunManifest) -> Iterator[_Cause]:
    for name, raises in _RAISED_BY_PLAN.items():
        old, new = before.plan.get(name), after.plan.get(name)
        if old != new and not (name == "checkpointing" and _repeats_all(old, new)):
            yield _Cause(f"{name} is {_short(new)} instead of {_short(old)}", raises)


def _repeats_all(old: object, new: object) -> bool:
    """Whether every block that was checkpointed still is: checkpointing then adds no memory."""
    was, now = ({name for names in _lists(each) for name in names} for each in (old, new))
    return was <= now


def _lists(checkpointing: object) -> list[list[str]]:
    tables = checkpointing if isinstance(checkpointing, Mapping) else {}
    return [[*value] for value in tables.values() if isinstance(value, list | tuple)]


def _sizes(before: RunManifest, after: RunManifest) -> Iterator[_Cause]:
    """Settings that decide how much is computed, and what was observed of model and loop."""
    for difference in compare_settings([before, after]):
        name, (old, new) = difference.name, difference.values
        if old is None or new is None or (_is_number(old) and _is_number(new) and new < old):
            continue
        sentence = f"{name} is {_short(new)} instead of {_short(old)}"
        if difference.group == "config" and decides_shape(name):
            is_batch = any(word in name.lower() for word in _WORDS_OF_BATCH)
            yield _Cause(sentence, (*_COMPUTED, "input") if is_batch else _ALL)
        elif difference.group == "model" and name in _RAISED_BY_MODEL:
            if name == "num_parameters":
                sentence = f"the model has {new:,} parameters instead of {old:,}"
            yield _Cause(sentence, _RAISED_BY_MODEL[name])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
