"""How does a plan schedule its units? A plan's settings as the policies that the schedule plays."""

from collections.abc import Mapping, Sequence

from fsdp_inspect.errors import PlanError
from fsdp_inspect.simulation.workload import Microbatch, UnitPolicy
from fsdp_inspect.trace.messages import suggest
from fsdp_inspect.trace.plan import Accumulation, Plan


def policies_of(plan: Plan, unit_names: Sequence[str]) -> list[UnitPolicy]:
    """The policy of each unit.

    Args:
        plan: A resolved plan (names, no patterns).
        unit_names: The units with parameters, by index; the plan may have more.

    Raises:
        PlanError: The plan lacks a unit, or prefetches one that there is not.
    """
    index = {name: position for position, name in enumerate(unit_names)}
    without = [unit.name for unit in plan.units if unit.name not in index]
    forward = plan.prefetch_lists("forward", without=without)
    backward = plan.prefetch_lists("backward", without=without)
    return [_policy(plan, name, index, forward.get(name, ()), backward.get(name))
            for name in unit_names]  # fmt: skip


def _policy(
    plan: Plan,
    name: str,
    index: Mapping[str, int],
    forward: Sequence[str],
    backward: Sequence[str] | None,
) -> UnitPolicy:
    unit = plan.unit(name)
    reshard = unit.reshard_after_forward
    return UnitPolicy(
        reshard_after_forward=not unit.is_root if reshard is None else bool(reshard),
        reshard_after_backward=unit.reshard_after_backward,
        unshard_in_backward=unit.unshard_in_backward,
        forward_prefetch=_indices(forward, index),
        backward_prefetch=None if backward is None else _indices(backward, index),
        is_async=unit.unshard_async_op,
    )


def _indices(names: Sequence[str], index: Mapping[str, int]) -> tuple[int, ...]:
    for name in names:
        if name not in index:
            raise PlanError(
                f"The plan prefetches {name!r}, which is no unit with parameters. "
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


def accumulation_of(microbatches: Sequence[Microbatch]) -> Accumulation:
    """What a training loop with these passes does; the inverse of `microbatches_of`."""
    *before, last = microbatches
    skips = [pass_ for pass_ in before if last.reduces and not pass_.reduces]
    waits = [pass_ for pass_ in before if last.all_reduces and not pass_.all_reduces]
    sync = "last" if skips else "all_reduce_last" if waits else "every"
    return Accumulation.model_validate({"microbatches": len(microbatches), "sync": sync})
