"""Write the torch code of a change, for scripts that call `fully_shard` themselves.

The code uses the names `model`, `mesh` and `module` (the argument of a `fully_shard` call) of the
user's script. A plan file makes the same change without code. Some changes have no code.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.trace.plan import ROOT, Plan, UnitPlan, prefetch_orders

MOST_CALLS = 4
"""The highest number of similar `fully_shard` calls in a snippet."""
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_NUMBERED = re.compile(r"([\w.]+)\.(\d+)")


def write_snippet(
    choice: Choice, before: Plan, after: Plan, *, without: Collection[str] = ()
) -> str:
    """The code that changes one plan into another; empty if no change has code.

    Args:
        choice: The changed settings.
        before: The resolved plan without the change.
        after: The resolved plan with the change.
        without: Names of units without parameters, which prefetch skips.
    """
    if after.fsdp1 is not None:
        return "\n".join(wrapper_lines(before, after))
    lines: list[str] = []
    for name in choice.changed:
        if name == "forward_prefetch":
            lines += prefetch_lines(after, "forward", without)
        elif name == "backward_prefetch":
            lines += prefetch_lines(after, "backward", without)
        else:
            lines += _lines(name, choice, before, after)
    return "\n".join(lines)


def _lines(name: str, choice: Choice, before: Plan, after: Plan) -> Iterator[str]:
    value = getattr(choice, name)
    if name == "reshard":
        yield from _reshard(after, value, is_all=choice.num_kept is None)
    elif name == "embedding_in_backward":
        for unit in _changed_units(before, after, "unshard_in_backward"):
            yield f"{_module(unit)}.set_unshard_in_backward({value})"
    elif name == "keep_root":
        changed = _changed_units(before, after, "reshard_after_forward")
        for root in (unit for unit in changed if unit.name in after.fsdp_roots):
            settings = f"mesh=mesh, reshard_after_forward={not value}"
            yield f"fully_shard({_module(root)}, {settings})  # the root's call"
    elif name in _OF_ALL:
        yield from _of_roots(_OF_ALL[name](value), after)
    else:
        yield from _OF_PLANS[name](before, after)


def sync_lines(after: Plan) -> list[str]:
    """The calls before a backward that reduce gradients as a plan states; empty for FSDP1."""
    if after.fsdp1 is not None:
        return []
    return list(_of_roots(_OF_ALL["accumulation_sync"](after.accumulation.sync), after))


def _of_roots(line: str, after: Plan) -> Iterator[str]:
    """A line with a setter of the model, for each root if the model itself is none."""
    roots = [unit.modules[0] for unit in after.units if unit.name in after.fsdp_roots]
    if roots == [ROOT] or not line.startswith("model."):
        yield line
        return
    yield f"for name in {list_names(roots)}:"
    yield f"    model.get_submodule(name){line.removeprefix('model')}"


def _mesh_lines(after: Plan) -> list[str]:
    sizes, names = tuple(after.mesh.values()), tuple(after.mesh)
    return [f"mesh = init_device_mesh(device_type, {sizes}, mesh_dim_names={names})"]


_OF_ALL: Mapping[str, Callable[[Any], str]] = {
    "reduce_buffers": lambda value: f"model.set_reduce_scatter_max_input_buffers({value})",
    "separate_reduce_group": lambda value: f"model.set_separate_reduce_scatter_group({value})",
    "async_gathers": lambda value: f"model._set_unshard_async_op({value})",
    "accumulation_sync": lambda value: (
        "model.set_requires_all_reduce(is_last_microbatch)  # before each backward"
        if value == "all_reduce_last"
        else f"model.set_requires_gradient_sync({'is_last_microbatch' if value == 'last' else True}"
        ")  # before each backward"
    ),
    "keep_between_microbatches": lambda value: (
        f"model.set_reshard_after_backward({'is_last_microbatch' if value else True})"
        "  # before each backward"
    ),
    "param_dtype": lambda value: (
        f"fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.{value}))"
    ),
    "reduce_dtype": lambda value: (
        "fully_shard(module, mesh=mesh, "
        f"mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{value}))"
    ),
}
"""Changes that apply to every unit."""


def _checkpoint(after: Plan) -> Iterator[str]:
    """Wrap the modules before any `fully_shard` call."""
    yield f"from {_WRAPPER} import checkpoint_wrapper"
    yield f"for name in {list_names(after.checkpointing.full)}:  # before fully_shard"
    yield "    parent, _, child = name.rpartition('.')"
    yield "    module = model.get_submodule(parent)"
    yield "    setattr(module, child, checkpoint_wrapper(getattr(module, child)))"


def _calls(before: Plan, after: Plan) -> Iterator[str]:
    """`fully_shard` calls of the new units, inner units first, or the calls to remove."""
    known, kept = ({unit.modules for unit in plan.units} for plan in (before, after))
    new = [unit for unit in after.units if unit.modules not in known]
    if not new:
        gone = [name for unit in before.units if unit.modules not in kept for name in unit.modules]
        yield "# remove your calls for these modules; the enclosing unit takes their parameters"
        yield f"names = {list_names(gone)}"
        return
    root_last = sorted(new, key=lambda unit: unit.is_root)
    calls = [f"fully_shard({_modules(unit)}, mesh=mesh)" for unit in root_last]
    yield "# replaces your calls for the same modules"
    yield from calls[:MOST_CALLS]
    if len(calls) > MOST_CALLS:
        yield f"# and {len(calls) - MOST_CALLS} similar calls: the plan file lists them"


def _reshard(after: Plan, value: bool | int, *, is_all: bool) -> Iterator[str]:
    """The calls of all inner units but those that stay as they are, such as a teacher's."""
    inner = after.inner_units
    left = [unit.modules[0] for unit in inner if is_all and unit.reshard_after_forward != value]
    yield f"# every call except the root's{f' and those of {list_names(left)}' if left else ''}"
    yield f"fully_shard(module, mesh=mesh, reshard_after_forward={value})"


def _keep(before: Plan, after: Plan) -> Iterator[str]:
    changed = _changed_units(before, after, "reshard_after_forward")
    kept = [unit for unit in changed if unit.reshard_after_forward is False]
    if kept:
        yield f"for name in {list_names([unit.modules[0] for unit in kept])}:"
        yield "    model.get_submodule(name).set_reshard_after_forward(False, recurse=False)"


def prefetch_lines(
    after: Plan,
    direction: Literal["forward", "backward"],
    without: Collection[str],
    *,
    model: str = "model",
    prefix: str = "",
) -> Iterator[str]:
    """The code of a depth of prefetch.

    Args:
        after: The resolved plan with the depth.
        direction: The pass.
        without: Names of units without parameters, which prefetch skips.
        model: The name of the model in the code.
        prefix: The module of the recorded model that it is.
    """
    depth = after.forward_prefetch if direction == "forward" else after.backward_prefetch
    first = {unit.name: relative_name(unit.modules[0], prefix) for unit in after.units}
    for order in prefetch_orders(after.units, direction, without=without):
        if len(order) > 1:
            yield f"names = {list_names([first[name] for name in order])}"
            yield f"units = [{model}.get_submodule(name) for name in names]"
            yield "for at, unit in enumerate(units):"
            yield f"    unit.set_modules_to_{direction}_prefetch(units[at + 1 : at + 1 + {depth}])"


def relative_name(name: str, prefix: str) -> str:
    """The name of a module as seen from one around it."""
    return name.removeprefix(prefix).removeprefix(".")


def _changed_units(before: Plan, after: Plan, setting: str) -> list[UnitPlan]:
    known = {unit.name: getattr(unit, setting) for unit in before.units}
    return [unit for unit in after.units if known.get(unit.name) != getattr(unit, setting)]


def _module(unit: UnitPlan) -> str:
    return "model" if unit.is_root else f"model.get_submodule({unit.modules[0]!r})"


def _modules(unit: UnitPlan) -> str:
    if len(unit.modules) == 1:
        return _module(unit)
    return f"[model.get_submodule(name) for name in {list_names(unit.modules)}]"


# --- Write the call of `FullyShardedDataParallel` (FSDP1).


def wrapper_lines(before: Plan, after: Plan) -> list[str]:
    """The code that wraps a model with the changed arguments of a plan of FSDP1."""
    lines, new, old = list[str](), _arguments(after), _arguments(before)
    changed = {name: value for name, value in new.items() if value != old[name]}
    if after.checkpointing != before.checkpointing:
        lines += _checkpoint(after)
    if after.unit_names != before.unit_names:
        names = [unit.modules[0] for unit in after.units if not unit.is_root]
        if names:
            lines += [
                "from torch.distributed.fsdp.wrap import CustomPolicy",
                f"names = {list_names(names)}",
                "wrapped = {id(model.get_submodule(name)) for name in names}",
            ]
        policy = "CustomPolicy(lambda module: id(module) in wrapped)" if names else "None"
        changed["auto_wrap_policy"] = policy
    if after.mesh != before.mesh:
        lines += _mesh_lines(after)
        changed["device_mesh"] = "mesh"
    if changed:
        used = {value.partition(".")[0].partition("(")[0] for value in changed.values()}
        classes = sorted({"FullyShardedDataParallel", *used} & set(_CLASSES))
        lines = [f"from torch.distributed.fsdp import {', '.join(classes)}", *lines]
        lines += ["model = FullyShardedDataParallel(", "    model,  # and your other arguments"]
        lines += [*(f"    {name}={value}," for name, value in changed.items()), ")"]
    if after.accumulation.sync != before.accumulation.sync:
        lines += _NO_SYNC if after.accumulation.sync == "last" else _ALWAYS_SYNC
    return lines


_NO_SYNC = (
    "from contextlib import nullcontext",
    "# around the forward and the backward of each microbatch",
    "with nullcontext() if is_last_microbatch else model.no_sync():",
    "    loss = model(inputs).loss / num_microbatches",
    "    loss.backward()",
)
_ALWAYS_SYNC = ("# run no microbatch in model.no_sync()",)
_CLASSES = ("BackwardPrefetch", "FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy")


def _arguments(plan: Plan) -> dict[str, str]:
    """The arguments of the wrapper that a plan decides, without units and mesh."""
    assert plan.fsdp1 is not None
    moment, unit = plan.fsdp1.backward_prefetch, plan.units[0]
    dtypes = {"param_dtype": unit.param_dtype, "reduce_dtype": unit.reduce_dtype}
    given = ", ".join(f"{name}=torch.{value}" for name, value in dtypes.items() if value)
    return {
        "sharding_strategy": f"ShardingStrategy.{_strategy(plan)}",
        "forward_prefetch": str(bool(plan.forward_prefetch)),
        "backward_prefetch": "None" if moment == "none" else f"BackwardPrefetch.{moment}",
        "limit_all_gathers": str(plan.fsdp1.limit_all_gathers),
        "mixed_precision": f"MixedPrecision({given})",
    }


def _strategy(plan: Plan) -> str:
    is_kept = all(unit.reshard_after_forward is False for unit in plan.inner_units or plan.units)
    if plan.mesh.get("replicate", 1) > 1:
        return "_HYBRID_SHARD_ZERO2" if is_kept else "HYBRID_SHARD"
    return "SHARD_GRAD_OP" if is_kept else "FULL_SHARD"


_OF_PLANS: Mapping[str, Callable[[Plan, Plan], Iterable[str]]] = {
    "grouping": _calls,
    "num_kept": _keep,
    "checkpointing": lambda _, after: _checkpoint(after),
    "replicas": lambda _, after: _mesh_lines(after),
}
"""Changes that the plans show."""


def list_names(names: Sequence[str]) -> str:
    """Names as a Python list; consecutive numbered names become one expression."""
    parts: list[str] = []
    for prefix, group in groupby(names, key=_prefix):
        run = list(group)
        numbers = [int(name.rpartition(".")[2]) for name in run] if prefix else []
        step = 1 if numbers[:1] < numbers[1:2] else -1
        is_row = len(numbers) > 2 and numbers == list(
            range(numbers[0], numbers[0] + step * len(numbers), step)
        )
        if is_row:
            bounds = (numbers[0], numbers[-1] + step, *((-1,) if step < 0 else ()))
            spread = ", ".join(str(bound) for bound in bounds)
            parts.append(f'*(f"{prefix}.{{at}}" for at in range({spread}))')
        else:
            parts += [repr(name) for name in run]
    return f"[{', '.join(parts)}]"


def _prefix(name: str) -> str:
    """The name before its final number; empty if it does not end in one."""
    found = _NUMBERED.fullmatch(name)
    return found[1] if found else ""
