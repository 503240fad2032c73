"""Make a `Plan` from the settings: `--wrap` and the other sharding settings.

Like torchtitan, `block` gives the embedding its own unit, which is freed after its use. It puts the
last norm and the output projection in one unit, which is kept for backward. Tied weights must be in
one unit: embedding and head then stay in the root unit.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import ConfigError, PlanError
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.plan import (
    DECIDED_BY_PLAN,
    ROOT,
    Accumulation,
    Checkpointing,
    Plan,
    UnitPlan,
)
from instrumented_trainer.config import TrainerConfig, legal_values
from instrumented_trainer.parts import ModelParts

_INSTEAD_OF_PLAN = tuple(name for name in DECIDED_BY_PLAN if name != "plan")
_UNITS_OF_SIZE = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6}

Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks and devices that the settings must fit; known before any process group exists."""

    world_size: int
    has_cuda: bool


def make_plan(config: TrainerConfig, parts: ModelParts, machine: Machine) -> Plan:
    """Make the plan of a run, resolved for its model.

    Raises:
        ConfigError: A setting does not fit the model or the number of ranks.
        PlanError: The plan file is invalid, or does not fit the model or the number of ranks.
    """
    if config.plan is not None:
        return _load_plan(config, parts, machine)
    compute = compute_dtype(config, machine)
    groups = [*_make_groups(config.wrap, parts, ITEMSIZE[compute]), (ROOT,)]
    settings = _unit_settings(config, compute, machine)
    units = [UnitPlan.model_validate({"modules": group, **settings}) for group in groups]
    mesh = parse_mesh(config.mesh, machine.world_size)
    plan = Plan(
        units=tuple(units),
        world_size=machine.world_size,
        mesh=mesh,
        forward_prefetch=config.forward_prefetch,
        backward_prefetch=config.backward_prefetch,
        accumulation=Accumulation(microbatches=config.microbatches, sync=config.accumulation_sync),
        checkpointing=_make_checkpointing(config.checkpointing, parts),
    )
    return _set_reshard(plan.resolve(parts.modules), config.reshard_after_forward, parts)


def compute_dtype(config: TrainerConfig, machine: Machine) -> str:
    """The dtype of all-gather and compute, with `auto` resolved."""
    if config.param_dtype == "auto":
        return "bfloat16" if machine.has_cuda else "float32"
    return config.param_dtype


def parse_mesh(text: str, world_size: int) -> dict[str, int]:
    """Parse `2x4` as replicas and shards, and `auto` and `N` as shards alone.

    Raises:
        ConfigError: The text is not a mesh, or the mesh has another number of ranks.
    """
    if text == "auto":
        return {"shard": world_size}
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text.replace(" ", ""))
    if not found:
        raise ConfigError(
            f"mesh is {text!r}. Expected {legal_values('mesh')}. Set --mesh to replicas x shards."
        )
    sizes = {"shard": int(found[2])}
    if found[1]:
        sizes = {"replicate": int(found[1]), **sizes}
    if math.prod(sizes.values()) != world_size:
        raise ConfigError(
            f"mesh is {text!r}, which has {math.prod(sizes.values())} ranks, but the world size is "
            f"{world_size}. Expected one of {_meshes_of(world_size)}. Set --mesh to one of them, "
            f"or start {math.prod(sizes.values())} ranks."
        )
    return sizes


def _meshes_of(world_size: int) -> str:
    return ", ".join(
        f"{world_size // shards}x{shards}"
        for shards in range(1, world_size + 1)
        if world_size % shards == 0
    )


def _load_plan(config: TrainerConfig, parts: ModelParts, machine: Machine) -> Plan:
    assert config.plan is not None
    fields = type(config).model_fields
    both = [name for name in _INSTEAD_OF_PLAN if getattr(config, name) != fields[name].default]
    if both:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in both)
        raise ConfigError(
            f"{flags} and --plan both define the sharding. Expected one of them. Remove {flags}, "
            f"or change the plan {config.plan!r}."
        )
    plan = Plan.load(config.plan).resolve(parts.modules)
    for unit in plan.units:
        _check_offload(unit.offload, machine)
        _check_container(f"The plan {config.plan!r}", unit.modules, parts)
    if plan.world_size not in (None, machine.world_size):
        raise PlanError(
            f"The plan {config.plan!r} requires a world size of {plan.world_size}, but it is "
            f"{machine.world_size}. Start {plan.world_size} ranks, or change "
            "world_size and mesh in the plan."
        )
    mesh = plan.mesh or {"shard": machine.world_size}
    if math.prod(mesh.values()) != machine.world_size:
        raise PlanError(
            f"The plan {config.plan!r} has the mesh {mesh}, but the world size is "
            f"{machine.world_size}. Start {math.prod(mesh.values())} ranks, or change the plan's "
            "mesh."
        )
    return Plan.from_dict({**plan.to_dict(), "world_size": machine.world_size, "mesh": mesh})


def _unit_settings(config: TrainerConfig, compute: str, machine: Machine) -> dict[str, Any]:
    _check_offload(config.offload, machine)
    reduce = "float32" if config.reduce_dtype == "auto" else config.reduce_dtype
    return {
        # Parameters are float32, and setting that dtype again would only add casts.
        "param_dtype": None if compute == "float32" else compute,
        "reduce_dtype": None if compute == reduce == "float32" else reduce,
        "offload": config.offload,
        "reshard_after_backward": config.reshard_after_backward,
        "unshard_async_op": config.unshard_async_op,
        "reduce_scatter_max_input_buffers": config.reduce_scatter_buffers,
        "separate_reduce_scatter_group": config.separate_reduce_scatter_group,
    }


def _check_offload(offload: str, machine: Machine) -> None:
    if offload == "cpu_pinned" and not machine.has_cuda:
        raise ConfigError(
            "offload is 'cpu_pinned', but there is no GPU, so pinned memory is unsupported. "
            "Expected 'none' or 'cpu'. Set --offload cpu."
        )


def _make_checkpointing(mode: str, parts: ModelParts) -> Checkpointing:
    return Checkpointing(
        full=parts.blocks if mode == "full" else (),
        selective=parts.blocks if mode == "selective" else (),
    )


# Wrapping -------------------------------------------------------------------------------------


def _make_groups(wrap: str, parts: ModelParts, itemsize: int) -> list[Group]:
    """The units of a `--wrap` setting, without the root unit."""
    if wrap == "root":
        return []
    if wrap == "block":
        return _with_ends(parts, [(block,) for block in parts.blocks])
    word, colon, value = wrap.partition(":")
    if word == "every" and colon:
        return _with_ends(parts, _every(parts.blocks, _parse_count(wrap, value)))
    if word == "size" and colon:
        return _with_ends(parts, _pack(parts, parse_size(wrap, value) // itemsize))
    return _parse_groups(wrap, parts)


def _with_ends(parts: ModelParts, blocks: Sequence[Group]) -> list[Group]:
    if parts.is_tied:
        return list(blocks)
    head = [parts.head] if parts.head else []
    return [*((name,) for name in parts.embeddings), *blocks, *head]


def _every(blocks: Sequence[str], count: int) -> list[Group]:
    return [tuple(blocks[first : first + count]) for first in range(0, len(blocks), count)]


def _pack(parts: ModelParts, limit: int) -> list[Group]:
    """Pack neighbouring blocks into units up to a limit; split larger blocks into halves.

    Args:
        parts: The parts of the model.
        limit: The highest number of parameters of a unit; a larger half is still one unit.
    """
    pieces: list[Group] = []
    for block in parts.blocks:
        is_split = parts.numel[block] > limit and block in parts.halves
        pieces += parts.halves[block] if is_split else [(block,)]
    units: list[Group] = []
    for piece in pieces:
        together = (*units[-1], *piece) if units else piece
        if units and sum(parts.numel[name] for name in together) <= limit:
            units[-1] = together
        else:
            units.append(piece)
    return units


def _parse_groups(wrap: str, parts: ModelParts) -> list[Group]:
    groups = [
        tuple(module.strip() for module in unit.split(",") if module.strip())
        for unit in wrap.split(";")
    ]
    groups = [group for group in groups if group]
    for group in groups:
        for name in group:
            if "*" not in name and name not in parts.modules:
                words = ["block", "root", *parts.modules[1:]]
                raise ConfigError(
                    f"wrap is {wrap!r}, but {name!r} is neither a keyword nor a module of the "
                    f"model. {suggest(name, words, what='keywords and modules')} Expected "
                    f"{legal_values('wrap')}. Set --wrap to that."
                )
        _check_container(f"wrap {wrap!r}", group, parts)
    return groups


def _check_container(what: str, group: Group, parts: ModelParts) -> None:
    for name in group:
        if name in parts.containers:
            raise ConfigError(
                f"{what} contains {name!r}, a list of modules, which is never called. Expected "
                f"modules that are called. Use its children: {name}.*"
            )


def _parse_count(wrap: str, value: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", value.strip()):
        raise ConfigError(
            f"wrap is {wrap!r}. Expected a number of blocks after 'every:', such as 'every:2'. "
            "Set --wrap to that."
        )
    return int(value)


def parse_size(wrap: str, value: str) -> int:
    """Parse a size such as `8MiB` to bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", value.strip().lower())
    unit = (found[2] or "") if found else "?"
    scale = _UNITS_OF_SIZE.get(unit, 10**9 if unit == "gb" else 0)
    if not found or float(found[1]) * scale < 1:
        raise ConfigError(
            f"wrap is {wrap!r}. Expected a size after 'size:', in bytes, KiB, MiB, GiB, kB, MB "
            "or GB, such as 'size:8MiB'. Set --wrap to that."
        )
    return int(float(found[1]) * scale)


# Resharding -----------------------------------------------------------------------------------


def _set_reshard(plan: Plan, text: str, parts: ModelParts) -> Plan:
    default, *own = [part.strip() for part in text.split(";") if part.strip()] or ["auto"]
    if "=" in default:
        default, own = "auto", [default, *own]
    plan = _set_default_reshard(plan, _parse_reshard(text, default, plan), parts)
    for assignment in own:
        names, _, value = assignment.rpartition("=")
        chosen = _parse_reshard(text, value.strip(), plan)
        plan = plan.change(_find_units(plan, names.strip()), reshard_after_forward=chosen)
    return plan


def _set_default_reshard(plan: Plan, chosen: bool | int | None, parts: ModelParts) -> Plan:
    if chosen is not None:
        return plan.change(plan.unit_names, reshard_after_forward=chosen)
    inner = [name for name in plan.unit_names if name != ROOT]
    head = [unit.name for unit in plan.units if parts.head and unit.modules == parts.head]
    plan = plan.change(inner, reshard_after_forward=True)
    return plan.change(head, reshard_after_forward=False)


def _parse_reshard(text: str, value: str, plan: Plan) -> bool | int | None:
    words = {"auto": None, "true": True, "false": False}
    if value in words:
        return words[value]
    shards = plan.mesh["shard"]
    divisors = [number for number in range(2, shards + 1) if shards % number == 0]
    if re.fullmatch(r"[1-9]\d*", value) and int(value) in divisors:
        return int(value)
    raise ConfigError(
        f"reshard_after_forward is {text!r}, but {value!r} does not fit {shards} sharding ranks. "
        f"Expected auto, true, false{''.join(f', {number}' for number in divisors)}; "
        "after `;` also per unit, such as 'true; layers.5=false'. Set "
        "--reshard-after-forward to one of them."
    )


def _find_units(plan: Plan, name: str) -> Iterable[str]:
    wanted = ", ".join(part.strip() for part in name.split(",")).replace("(root)", ROOT)
    pattern = "[^.]*".join(re.escape(piece) for piece in wanted.split("*"))
    found = [unit for unit in plan.unit_names if re.fullmatch(pattern, unit)]
    if not found:
        raise ConfigError(
            f"reshard_after_forward contains an unknown unit {name!r}. "
            f"{suggest(wanted, plan.unit_names, what='units')} Use one of the units."
        )
    return found
