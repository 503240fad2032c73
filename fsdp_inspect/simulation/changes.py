"""Change single settings of a plan, such as `--wrap every:2`, prefetch depth or reshard.

Each change returns a new plan. Unnamed settings stay as they are.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Literal

from fsdp_inspect.errors import PlanError
from fsdp_inspect.trace.plan import (
    ROOT,
    AccumulationSync,
    BackwardPrefetch,
    Checkpointing,
    FloatDtype,
    Plan,
    UnitPlan,
    owned_parameters,
)

_NUMBERED = re.compile(r"(.*)\.(\d+)")
BLOCK = re.compile(r"(.+?)\.\d+(?=\.)")
"""The outermost numbered module around a parameter: `layers.3` of `layers.3.mlp.weight`."""
CheckpointingMode = Literal["none", "full"]
WRAPS = "`root`, `block`, `every:N` with N from 1, or `split` (halves of blocks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes to a plan; None keeps a setting."""

    wrap: str | None = None
    forward_prefetch: int | None = None
    backward_prefetch: int | BackwardPrefetch | None = None
    """The number of units; for FSDP1, when backward gathers the next unit."""
    limit_all_gathers: bool | None = None
    """FSDP1: whether the host waits until at most two all-gathers are in flight."""
    reshard_after_forward: bool | int | None = None
    """For every unit but the root, which torch treats separately, and units kept unsharded."""
    param_dtype: FloatDtype | None = None
    reduce_dtype: FloatDtype | None = None
    reduce_scatter_buffers: int | None = None
    separate_reduce_scatter_group: bool | None = None
    world_size: int | None = None
    replicas: int | None = None
    """Copies of the model that all-reduce their gradients (HSDP); 1: all ranks shard."""
    microbatches: int | None = None
    accumulation_sync: AccumulationSync | None = None
    checkpointing: CheckpointingMode | None = None
    """For every block: `full` drops its activations in forward and repeats it in backward."""


_OF_INNER_UNITS = {"reshard_after_forward": "reshard_after_forward"}
_OF_ALL_UNITS = {
    "param_dtype": "param_dtype",
    "reduce_dtype": "reduce_dtype",
    "reduce_scatter_buffers": "reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "separate_reduce_scatter_group",
}
"""Settings of units: the name of the change, and its name in a plan."""


def apply_changes(
    plan: Plan, changes: Changes, parameters: Mapping[str, Sequence[int]] | None = None
) -> Plan:
    """Apply changes to a plan.

    Args:
        plan: A resolved plan: names, no patterns.
        changes: The changes.
        parameters: Shape of each parameter, by name; required to split blocks.

    Raises:
        PlanError: A change is invalid, or does not fit the plan.
    """
    if changes.wrap is not None:
        plan = wrap(plan, changes.wrap, parameters or {})
    fields: dict[str, object] = {}
    if changes.forward_prefetch is not None:
        fields["forward_prefetch"] = changes.forward_prefetch
    fields |= _prefetch_and_limit(plan, changes)
    if changes.world_size is not None or changes.replicas is not None:
        fields |= resized(plan, changes.world_size, changes.replicas)
    accumulation = {"microbatches": changes.microbatches, "sync": changes.accumulation_sync}
    if named := {name: value for name, value in accumulation.items() if value is not None}:
        fields["accumulation"] = {**plan.accumulation.model_dump(), **named}
    if changes.checkpointing is not None:
        fields["checkpointing"] = checkpoint(plan, changes.checkpointing, parameters or {})
    if fields:
        plan = Plan.from_dict({**plan.to_dict(), **fields})
    inner = [unit.name for unit in plan.inner_units]
    for names, table in ((inner, _OF_INNER_UNITS), (plan.unit_names, _OF_ALL_UNITS)):
        settings = {
            setting: value
            for change, setting in table.items()
            if (value := getattr(changes, change)) is not None
        }
        plan = plan.change(names, **settings) if settings else plan
    return plan


def _prefetch_and_limit(plan: Plan, changes: Changes) -> dict[str, object]:
    """The changed prefetch in backward, and the limit of all-gathers.

    Raises:
        PlanError: A setting of FSDP1 changes a plan of FSDP2.
    """
    moment, limit = changes.backward_prefetch, changes.limit_all_gathers
    fields: dict[str, object] = {"backward_prefetch": moment} if isinstance(moment, int) else {}
    values = {"backward_prefetch": moment, "limit_all_gathers": limit}
    changed = {name: value for name, value in values.items() if isinstance(value, str | bool)}
    if changed and plan.fsdp1 is None:
        raise PlanError(
            f"The settings {', '.join(changed)} are those of FullyShardedDataParallel (FSDP1). "
            "Expected a plan of FSDP1, and this one is of fully_shard. Leave them out."
        )
    if plan.fsdp1 is not None:
        fields["fsdp1"] = {**plan.fsdp1.model_dump(), **changed}
    return fields


def checkpoint(
    plan: Plan, mode: CheckpointingMode, parameters: Mapping[str, Sequence[int]]
) -> Checkpointing:
    """Activation checkpointing of every block, or of none.

    Args:
        plan: A resolved plan.
        mode: The mode.
        parameters: Shape of each parameter, by name: it shows blocks that are not units.

    Raises:
        PlanError: The plan has no numbered blocks.
    """
    if mode == "none":
        return Checkpointing()
    around = (f"{module}." for unit in plan.units for module in unit.modules)
    names = [*around, *parameters]
    blocks = dict.fromkeys(found[0] for name in names if (found := BLOCK.match(name)))
    if not blocks:
        raise PlanError(
            "The plan has no block to checkpoint: no module is numbered. Expected names such as "
            "layers.0. Name the modules in a plan file: [checkpointing] full = [...]."
        )
    return Checkpointing(full=tuple(blocks))


def is_wrap(policy: str) -> bool:
    """Whether a wrap policy is valid: see `WRAPS`."""
    return re.fullmatch(r"root|block|split|every:[1-9][0-9]{0,8}", policy) is not None


def wrap(plan: Plan, policy: str, parameters: Mapping[str, Sequence[int]] | None = None) -> Plan:
    """Group the numbered blocks of a plan. Prefetch by name becomes torch's own prefetch.

    Args:
        plan: Units of single blocks (`layers.0`, ...), as recorded with one unit per block.
        policy: See `WRAPS`.
        parameters: Shape of each parameter, by name; required to split blocks.

    Raises:
        PlanError: The policy is invalid, or the plan has no blocks to group or split.
    """
    if policy == "split":
        return _halved(wrap(plan, "block"), parameters or {})
    if policy == "root":
        names = plan.fsdp_roots
        roots = [unit for unit in plan.units if unit.name in names]
        modules = roots[0].modules if len(roots) == 1 else (ROOT,)
        alone = roots[0].model_copy(update={"modules": modules, "reshard_after_forward": None})
        return with_units(plan, [alone])
    if not is_wrap(policy):
        raise PlanError(f"Invalid wrap policy: {policy!r}. Expected {WRAPS}.")
    if not any(map(_stem, plan.units)):
        raise PlanError(
            "Unsupported wrap: no unit consists of numbered blocks, and the time and memory of "
            "parts of a unit are unknown. Expected units such as layers.0. Record a run in which "
            "each block is a unit."
        )
    size = 1 if policy == "block" else int(policy.removeprefix("every:"))
    grouped = [_grouped(members, size) for members in _runs_of_blocks(plan.units)]
    return with_units(plan, [unit for units in grouped for unit in units])


def _halved(plan: Plan, parameters: Mapping[str, Sequence[int]]) -> Plan:
    blocks = [unit.name for unit in plan.units if _stem(unit) is not None]
    split = split_units(plan, blocks, parameters)
    if split == plan:
        raise PlanError(
            "The plan has no block to split: no block is a unit of several modules with matrices "
            "and recorded parameters. Expected numbered blocks with parts, such as layers.0. "
            "Choose another wrap, or name the parts in a plan file."
        )
    return split


def split_units(plan: Plan, names: Iterable[str], parameters: Mapping[str, Sequence[int]]) -> Plan:
    """Split units of one module into that module's children.

    A norm joins the module that it feeds, so each new unit holds a matrix. The root and units that
    cannot be split stay as they are. Prefetch that names a split unit becomes torch's own prefetch.

    Args:
        plan: A resolved plan.
        names: Names of units.
        parameters: Shape of each parameter of the model, by name.
    """
    wanted = set(names)
    owned = owned_parameters(plan.units, parameters)
    units: list[UnitPlan] = []
    for unit in plan.units:
        found = _parts(unit, owned[unit.name], parameters) if unit.name in wanted else None
        parts = [unit.model_copy(update={"modules": tuple(each)}) for each in found or ()]
        units += parts or [unit]
    return with_units(plan, units) if len(units) > len(plan.units) else plan


def _parts(
    unit: UnitPlan, owned: Sequence[str], parameters: Mapping[str, Sequence[int]]
) -> list[list[str]] | None:
    """A unit's children in groups with a matrix each: a norm joins the module that it feeds."""
    if unit.is_root or len(unit.modules) != 1:
        return None
    module = unit.modules[0]
    children = list(dict.fromkeys(_child(parameter, module) for parameter in owned))
    if len(children) < 2 or None in children:
        return None
    parts: list[list[str]] = [[]]
    for child in (each for each in children if each is not None):
        parts[-1].append(child)
        if any(len(parameters[p]) > 1 for p in owned if p.startswith(f"{child}.")):
            parts.append([])
    # Vectors after the last matrix feed no known module: the order does not show it.
    return parts[:-1] if not parts[-1] and len(parts) > 2 else None


def _child(parameter: str, module: str) -> str | None:
    """The child of a module that holds a parameter; None: the module itself holds it."""
    segments = parameter.removeprefix(f"{module}.").split(".")
    return f"{module}.{segments[0]}" if len(segments) > 1 else None


def _runs_of_blocks(units: Sequence[UnitPlan]) -> Iterator[list[UnitPlan]]:
    """Consecutive units of blocks of one list (`layers.0`, `layers.1`); other units alone."""
    for stem, members in groupby(units, key=_stem):
        run = list(members)
        if stem is None:
            yield from ([unit] for unit in run)
        else:
            yield run


def _stem(unit: UnitPlan) -> str | None:
    """The list whose blocks a unit holds; None: the unit holds other modules."""
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


def with_units(plan: Plan, units: Sequence[UnitPlan]) -> Plan:
    """The plan with other units. Prefetch that names a removed unit becomes torch's own."""
    fields = plan.to_dict()
    names = {unit.name for unit in units}
    for direction in ("forward_prefetch", "backward_prefetch"):
        named = fields[direction]
        if isinstance(named, dict) and not {*named, *chain.from_iterable(named.values())} <= names:
            fields[direction] = 0
    return Plan.from_dict({**fields, "units": [unit.model_dump(mode="json") for unit in units]})


def resized(plan: Plan, world_size: int | None, replicas: int | None) -> dict[str, object]:
    """The mesh for another world size, or for other replicas; an unnamed one stays.

    The ranks of other parallelism (tensor, pipeline) keep their number.
    """
    if any(unit.mesh for unit in plan.units):
        raise PlanError(
            "The mesh cannot be changed: some units have a mesh of their own. Expected one mesh "
            "for all units. Change the meshes in a plan file, and simulate that file."
        )
    replicate = plan.mesh.get("replicate", 1) if replicas is None else replicas
    all_ranks = world_size or plan.world_size or math.prod(plan.mesh.values())
    ranks, rest = divmod(all_ranks, plan.num_other_ranks)
    if not plan.mesh and world_size is None and plan.world_size is None:
        raise PlanError(
            "The number of ranks is unknown: the plan has no world size. Expected a world size "
            "with the replicas. Set both."
        )
    if rest or ranks % replicate:
        least = replicate * plan.num_other_ranks
        raise PlanError(
            f"Invalid mesh: a world size of {all_ranks} with {replicate} replicas. Expected a "
            f"multiple of {least}. Change the world size or the replicas."
        )
    mesh: dict[str, int] = {"replicate": replicate} if replicate > 1 else {}
    return {"world_size": all_ranks, "mesh": {**mesh, "shard": ranks // replicate}}
