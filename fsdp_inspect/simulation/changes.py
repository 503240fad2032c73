"""Which plan does a single change make of another? `--wrap every:2`, depth of prefetch, reshard.

Each change returns a new plan and leaves what it does not name as it was.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from fsdp_inspect.errors import PlanError
from fsdp_inspect.trace.plan import ROOT, FloatDtype, Plan, UnitPlan

_NUMBERED = re.compile(r"(.*)\.(\d+)")
WRAPS = "`root`, `block`, or `every:N` with N from 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What to change in a plan; None leaves it as it was."""

    wrap: str | None = None
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    reshard_after_forward: bool | int | None = None
    """Of every unit but the root, which torch treats by itself, and units kept unsharded."""
    param_dtype: FloatDtype | None = None
    reduce_dtype: FloatDtype | None = None
    world_size: int | None = None


def apply_changes(plan: Plan, changes: Changes) -> Plan:
    """The plan with the changes.

    Args:
        plan: A resolved plan: names, no patterns.
        changes: Each one optional.

    Raises:
        PlanError: A change is not legal, or does not fit the plan.
    """
    if changes.wrap is not None:
        plan = wrap(plan, changes.wrap)
    settings = {
        name: value
        for name in ("reshard_after_forward", "param_dtype", "reduce_dtype")
        if (value := getattr(changes, name)) is not None
    }
    if settings:
        inner = [unit.name for unit in plan.units if not unit.is_root]
        dtypes = {name: value for name, value in settings.items() if name.endswith("dtype")}
        plan = plan.change(inner, **settings)
        plan = plan.change([unit.name for unit in plan.units if unit.is_root], **dtypes)
    fields: dict[str, object] = {}
    if changes.forward_prefetch is not None:
        fields["forward_prefetch"] = changes.forward_prefetch
    if changes.backward_prefetch is not None:
        fields["backward_prefetch"] = changes.backward_prefetch
    if changes.world_size is not None:
        fields |= _resized(plan, changes.world_size)
    return Plan.from_dict({**plan.to_dict(), **fields}) if fields else plan


def wrap(plan: Plan, policy: str) -> Plan:
    """The plan with its numbered blocks grouped otherwise; prefetch by name becomes torch's own.

    Args:
        plan: Units of single blocks (`layers.0`, ...), as recorded with one unit a block.
        policy: See `WRAPS`.

    Raises:
        PlanError: No such policy, or no numbered blocks to group.
    """
    if policy == "root":
        root = next((unit for unit in plan.units if unit.is_root), plan.units[0])
        alone = root.model_copy(update={"modules": (ROOT,), "reshard_after_forward": None})
        return _with_units(plan, [alone])
    every = re.fullmatch(r"every:([1-9]\d*)", "every:1" if policy == "block" else policy)
    if every is None:
        raise PlanError(f"The wrap policy is {policy!r}. Expected {WRAPS}.")
    grouped = [_grouped(members, int(every[1])) for members in _runs_of_blocks(plan.units)]
    return _with_units(plan, [unit for units in grouped for unit in units])


def _runs_of_blocks(units: Sequence[UnitPlan]) -> Iterator[list[UnitPlan]]:
    """Consecutive units of blocks of one list (`layers.0`, `layers.1`), and all others alone."""
    for stem, members in groupby(units, key=_stem):
        run = list(members)
        if stem is None:
            yield from ([unit] for unit in run)
        else:
            yield run


def _stem(unit: UnitPlan) -> str | None:
    """The list whose blocks a unit holds; None: it holds something else."""
    stems = {found[1] if (found := _NUMBERED.fullmatch(name)) else None for name in unit.modules}
    return stems.pop() if len(stems) == 1 else None


def _grouped(units: Sequence[UnitPlan], size: int) -> list[UnitPlan]:
    """The blocks of some units in groups of a size, with the settings of the first unit."""
    if _stem(units[0]) is None:
        return list(units)
    blocks = [module for unit in units for module in unit.modules]
    return [
        units[0].model_copy(update={"modules": tuple(blocks[start : start + size])})
        for start in range(0, len(blocks), size)
    ]


def _with_units(plan: Plan, units: Sequence[UnitPlan]) -> Plan:
    """Prefetch that names units that are gone is left to torch."""
    fields = plan.to_dict()
    names = {unit.name for unit in units}
    for direction in ("forward_prefetch", "backward_prefetch"):
        named = fields[direction]
        if isinstance(named, dict) and not {*named, *chain.from_iterable(named.values())} <= names:
            fields[direction] = 0
    return Plan.from_dict({**fields, "units": [unit.model_dump(mode="json") for unit in units]})


def _resized(plan: Plan, world_size: int) -> dict[str, object]:
    """The mesh of another world size: the shard dimension grows, the replicas stay."""
    replicate = plan.mesh.get("replicate", 1)
    if world_size % replicate:
        raise PlanError(
            f"The world size is {world_size}, with {replicate} replicas. Expected a multiple of "
            f"{replicate}. Change the mesh in a plan file to change the replicas."
        )
    mesh: dict[str, int] = {"replicate": replicate} if replicate > 1 else {}
    return {"world_size": world_size, "mesh": {**mesh, "shard": world_size // replicate}}
