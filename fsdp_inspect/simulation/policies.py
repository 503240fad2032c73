"""Convert the settings of a plan into the policies that the schedule follows."""

from collections.abc import Mapping, Sequence

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import PlanError
from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.simulation.workload import Microbatch, Pass, UnitPolicy
from fsdp_inspect.trace.plan import Accumulation, Plan, UnitPlan


def policies_of(
    plan: Plan, unit_names: Sequence[str], shard: int | None = None
) -> list[UnitPolicy]:
    """The policy of each unit.

    Args:
        plan: A resolved plan (names, no patterns).
        unit_names: The units with parameters, by index; the plan may have more.
        shard: Ranks that shard the units without a separate mesh; None: unknown, so no number of
            ranks means all of them.

    Raises:
        PlanError: The plan lacks a unit, or prefetches an unknown unit.
    """
    index = {name: position for position, name in enumerate(unit_names)}
    planned = {unit.name: unit for unit in plan.units}
    without = {name for name in planned if name not in index}
    forward = plan.prefetch_lists("forward", without=without)
    backward = plan.prefetch_lists("backward", without=without)
    root_of = plan.root_of_units
    # Without a reduction, FSDP1 frees what its strategy frees after forward.
    is_freed = None if plan.fsdp1 is None else _frees_after_forward(plan)
    numbers = {root: number for number, root in enumerate(dict.fromkeys(root_of.values()))}
    return [
        _policy(
            unit,
            reshard_of(
                unit,
                None if shard is None else unit.num_shards(shard),
                is_root=root_of[name] == name,
            ),
            _indices(forward.get(name, ()), index),
            None if (named := backward.get(name)) is None else _indices(named, index),
            numbers[root_of[name]],
            is_freed,
        )
        for name in unit_names
        for unit in (planned.get(name) or plan.unit(name),)
    ]


def reshard_of(unit: UnitPlan, shard: int | None = None, *, is_root: bool) -> bool | int:
    """The effective reshard of the unit after forward; an int is the size of a smaller group.

    For a group of one rank, torch keeps the parameters whole. A group of all ranks has the same
    effect as True.

    Args:
        unit: A unit of a plan.
        shard: Ranks of its shard group; None: unknown.
        is_root: Whether torch makes it an FSDP root (`Plan.fsdp_roots`).
    """
    wanted = unit.reshard_after_forward
    if wanted is None or isinstance(wanted, bool):
        return not is_root if wanted is None else wanted
    if wanted == 1:
        return False
    return True if wanted == shard else wanted


def _frees_after_forward(plan: Plan) -> bool:
    """Whether the strategy of an FSDP1 plan frees parameters after forward, except in the root."""
    roots = plan.fsdp_roots
    inner = [unit for unit in plan.units if unit.name not in roots] or plan.units
    return any(unit.reshard_after_forward is not False for unit in inner)


def _policy(
    unit: UnitPlan,
    reshard: bool | int,
    forward: tuple[int, ...],
    backward: tuple[int, ...] | None,
    root: int,
    is_freed: bool | None,
) -> UnitPolicy:
    return UnitPolicy(
        reshard_after_forward=bool(reshard),
        smaller_group=smaller_group(reshard),
        reshard_after_backward=unit.reshard_after_backward if is_freed is None else is_freed,
        unshard_in_backward=unit.unshard_in_backward,
        forward_prefetch=forward,
        backward_prefetch=backward,
        is_async=unit.unshard_async_op,
        root=root,
    )


def _indices(names: Sequence[str], index: Mapping[str, int]) -> tuple[int, ...]:
    for name in names:
        if name not in index:
            raise PlanError(
                f"Invalid prefetch of {name!r}: it is not a unit with parameters. "
                f"{suggest(name, list(index), what='units')} Correct the prefetch."
            )
    return tuple(index[name] for name in names)


def microbatches_of(accumulation: Accumulation) -> tuple[Microbatch, ...]:
    """The forward and backward passes of a step."""
    last = accumulation.microbatches - 1
    return tuple(
        Microbatch(
            reduces=accumulation.sync != "last" or number == last,
            all_reduces=accumulation.sync == "every" or number == last,
        )
        for number in range(accumulation.microbatches)
    )


def microbatches_of_passes(passes: Sequence[Pass]) -> tuple[Microbatch, ...] | None:
    """The microbatches of a step; None if it is not a forward and its backward for each of them.

    All forwards must have one tape, and all backwards too.
    """
    forwards, backwards = passes[::2], passes[1::2]
    if not backwards or len(forwards) != len(backwards):
        return None
    if not all(each.is_forward for each in forwards) or any(each.is_forward for each in backwards):
        return None
    if len({each.tape for each in forwards}) > 1 or len({each.tape for each in backwards}) > 1:
        return None
    return tuple(
        Microbatch(
            reduces=each.reduces is None or bool(each.reduces),
            all_reduces=each.all_reduces,
            finishes=each.finishes,
        )
        for each in backwards
    )


def accumulation_of_passes(passes: Sequence[Pass]) -> Accumulation | None:
    """The accumulation of a step; None if its passes are not those of a plain loop."""
    microbatches = microbatches_of_passes(passes)
    return None if microbatches is None else accumulation_of(microbatches)


def accumulation_of(microbatches: Sequence[Microbatch]) -> Accumulation:
    """The accumulation of a training loop with these passes; the inverse of `microbatches_of`."""
    *before, last = microbatches
    skips = [pass_ for pass_ in before if last.reduces and not pass_.reduces]
    waits = [pass_ for pass_ in before if last.all_reduces and not pass_.all_reduces]
    sync = "last" if skips else "all_reduce_last" if waits else "every"
    return Accumulation.model_validate({"microbatches": len(microbatches), "sync": sync})
