"""Define the plan: how a model is sharded, as a file that people can read, change and apply.

A plan lists the `fully_shard` calls (units) with their settings, the mesh, the prefetch order and
the training loop's settings. It contains module names, not modules: `torch_api.apply_plan` applies
it to a model, `torch_api.observe_plan` reads it from a model. None means "torch decides" and is
written "auto" in the file.

Module names are fully qualified, without wrapper segments; the model itself has the empty name.
`*` matches one segment of a name: `layers.*` is one unit for each block, and
`["layers.*.ffn_norm", "layers.*.ffn"]` is one unit of two modules for each block. A pattern does
not match modules that another entry names in full. In the file, `layers.{0..7}` means the eight
names; `plan_text` describes the file format.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)

from fsdp_inspect.error_text import describe_validation_error, quote_all, suggest
from fsdp_inspect.errors import PlanError
from fsdp_inspect.reading import MAX_TOML_BYTES, read_regular
from fsdp_inspect.trace import plan_text
from fsdp_inspect.trace.records import MAX_MICROBATCHES, MAX_WORLD_SIZE
from fsdp_inspect.writing import replace_file

PLAN_VERSION = 1
"""Increased when an older reader would misread a newer plan."""

T = TypeVar("T")
ROOT = ""
"""The model itself."""

AccumulationSync = Literal["every", "last", "all_reduce_last"]
FloatDtype = Literal["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "none"]
PositiveInt = Annotated[int, Field(strict=True, ge=1, le=MAX_WORLD_SIZE)]
Microbatches = Annotated[int, Field(strict=True, ge=1, le=MAX_MICROBATCHES)]


def _check_reshard(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(
        f"reshard_after_forward is {value!r}. Expected true, false, the number of ranks to "
        'reshard to, or "auto"'
    )


def _check_prefetch(value: Any) -> Any:
    is_depth = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_table = isinstance(value, Mapping) and all(
        isinstance(targets, list | tuple) for targets in value.values()
    )
    if is_depth or is_table:
        return value or 0
    raise ValueError(
        f"A prefetch is {value!r}. Expected the number of units to prefetch (0: torch's own "
        "order), or a table from a unit's name to the names of the units that it prefetches"
    )


def _order_mesh(mesh: dict[str, int]) -> dict[str, int]:
    return {name: mesh[name] for name in ("replicate", "shard") if name in mesh}


MeshSizes = Annotated[
    dict[Literal["replicate", "shard"], PositiveInt],
    AfterValidator(_order_mesh),
    Field(default_factory=dict),
]
"""Ranks in each dimension, outermost first."""
Reshard = Annotated[bool | int | None, BeforeValidator(_check_reshard)]
Prefetch = Annotated[int | dict[str, tuple[str, ...]], BeforeValidator(_check_prefetch)]


class PlanRecord(BaseModel):
    """Base of the records of a plan: unknown keys are rejected, values never change."""

    # Validate instances again when a plan is built from them: `change` does not check values.
    model_config = ConfigDict(extra="forbid", frozen=True, revalidate_instances="always")


class UnitPlan(PlanRecord):
    """One `fully_shard` call, or one for each match of a pattern."""

    modules: tuple[str, ...]
    """The modules of the unit; several modules mean `fully_shard([a, b])`."""
    reshard_after_forward: Reshard = None
    """An int is the number of ranks to reshard to. None: torch's default, which is True, but False
    for the root."""
    reshard_after_backward: StrictBool = True
    unshard_in_backward: StrictBool = True
    unshard_async_op: StrictBool = False
    """Issue the all-gather on the compute stream; overlap then requires explicit prefetch."""
    reduce_scatter_max_input_buffers: PositiveInt = 1
    separate_reduce_scatter_group: StrictBool = False
    """Reduce-scatter on a separate communicator, concurrently with the all-gathers."""
    param_dtype: FloatDtype | None = None
    """The dtype of all-gather and compute; None: the dtype of the parameters."""
    reduce_dtype: FloatDtype | None = None
    """The dtype of gradient reduction; None: torch decides. Before 2.15 it is the compute dtype,
    since then that of the parameters."""
    output_dtype: FloatDtype | None = None
    cast_forward_inputs: StrictBool = True
    offload: Literal["none", "cpu", "cpu_pinned"] = "none"
    """The host memory for sharded parameters, gradients and optimizer state, if any."""
    mesh: MeshSizes
    """The unit's own mesh, such as that of experts; empty: the plan's mesh."""

    @property
    def name(self) -> str:
        """The name that torch gives the unit: its modules joined by `, `; empty for the root."""
        return ", ".join(self.modules)

    @property
    def is_root(self) -> bool:
        """Whether the unit is the model itself."""
        return self.modules == (ROOT,)

    @property
    def is_pattern(self) -> bool:
        """Whether the entry is a pattern, with one unit for each match."""
        return any("*" in module for module in self.modules)

    def num_shards(self, of_plan: int) -> int:
        """The number of ranks that shard the unit.

        Args:
            of_plan: The number for units without a separate mesh.
        """
        return self.mesh.get("shard", 1) if self.mesh else of_plan

    @model_validator(mode="after")
    def _check_modules(self) -> Self:
        if not self.modules:
            raise ValueError('A unit has no modules. Expected at least one name in "modules"')
        for module in self.modules:
            _check_module_name(module)
        if len(set(self.modules)) != len(self.modules):
            raise ValueError(f"The unit {self.name!r} names a module twice. Name each one once")
        if len(self.modules) > 1:
            _check_group(self.modules)
        return self


class Accumulation(PlanRecord):
    """The number of microbatches of a step, and the time at which gradients are reduced."""

    microbatches: Microbatches = 1
    sync: AccumulationSync = "every"
    """`every`: reduce in each microbatch. `last`: reduce in the last one; gradients stay unsharded
    until then. `all_reduce_last` (HSDP): reduce-scatter in each and all-reduce in the last one."""


class Checkpointing(PlanRecord):
    """The modules that drop their activations in forward and recompute them in backward."""

    full: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()
    """Modules that keep the results of matrix products and attention and recompute the rest."""


class Fsdp1Settings(PlanRecord):
    """The settings of `FullyShardedDataParallel` (FSDP1) that `fully_shard` does not have."""

    backward_prefetch: BackwardPrefetch = "BACKWARD_PRE"
    """When backward gathers the next unit: before the gradients of the current unit, after them, or
    when the next unit needs it."""
    limit_all_gathers: StrictBool = True
    """The host waits until at most two all-gathers are in flight."""
    use_orig_params: StrictBool = False
    """A flat parameter then aligns each of its parameters to 16 bytes."""


class Plan(PlanRecord):
    """A plan: units, mesh, prefetch, and the training loop's settings."""

    version: Literal[1] = 1
    units: tuple[UnitPlan, ...]
    """The units in any order; `apply_plan` shards inner modules first."""
    world_size: PositiveInt | None = None
    mesh: MeshSizes
    """The ranks of the data-parallel mesh; empty: all ranks shard. Its product divides the world
    size: tensor, expert or pipeline parallelism use the other ranks. Without `shard`, parameters
    are replicated (torch's `replicate`)."""
    forward_prefetch: Prefetch = 0
    """The number of units to prefetch, in the order of the model's modules; or, for each unit, the
    names of the units that it prefetches. 0: torch's own order."""
    backward_prefetch: Prefetch = 0
    """Like `forward_prefetch`, in the reverse order."""
    fsdp1: Fsdp1Settings | None = None
    """The plan is one of FSDP1: each unit is a wrapper around one module, and the sharding strategy
    is `reshard_after_forward` of the units in the root. None: the units are those of `fully_shard`.
    """
    accumulation: Accumulation = Accumulation()
    checkpointing: Checkpointing = Checkpointing()
    notes: tuple[str, ...] = ()
    """Properties of the observed model that a plan cannot express."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan file.

        Raises:
            PlanError: The file does not exist or is not a valid plan. The error names the place.
        """
        path = Path(path)
        try:
            text = read_regular(path, MAX_TOML_BYTES)
        except OSError as error:
            raise PlanError(
                f"The plan {str(path)!r} cannot be read: {error}. Expected a TOML file as "
                "written by Plan.dump. Name an existing plan file."
            ) from error
        try:
            return cls.from_toml(text)
        except PlanError as error:
            raise PlanError(f"The plan {str(path)!r} is invalid. {error}") from error

    @classmethod
    def from_toml(cls, text: str | bytes) -> Self:
        """Read a plan from the text of a plan file."""
        return cls.from_dict(plan_text.parse(text))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Read a plan from plain values, such as a run manifest's `plan`."""
        version = fields.get("version", PLAN_VERSION)
        if isinstance(version, int) and version > PLAN_VERSION:
            raise PlanError(
                f"Unsupported plan version {version}. Expected a version up to {PLAN_VERSION}. "
                "Update fsdp-inspect."
            )
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            complaint = describe_validation_error(error, legal_keys=_LEGAL_KEYS)
            raise PlanError(f"{complaint} Correct the plan.") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which `from_dict` reads."""
        # Without the key, older versions can read a plan of FSDP2.
        return self.model_dump(mode="json", exclude=None if self.fsdp1 else {"fsdp1"})

    def to_toml(self) -> str:
        """The text of a plan file; `from_toml` reads it to an equal plan."""
        return plan_text.render(self.model_dump(mode="python"), plan_text.defaults_of(UnitPlan))

    def dump(self, path: str | Path) -> None:
        """Write a plan file; an existing file is replaced as a whole. All ranks may write it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, self.to_toml().encode())

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The names of the units, in the plan's order."""
        return tuple(unit.name for unit in self.units)

    def unit(self, name: str) -> UnitPlan:
        """The unit with the given name.

        Raises:
            PlanError: The plan has no such unit. The error suggests similar names.
        """
        for unit in self.units:
            if unit.name == name:
                return unit
        raise PlanError(
            f"The plan has no unit {name!r}. {suggest(name, self.unit_names, what='units')} "
            "Name one of its units."
        )

    def mesh_of(self, unit: UnitPlan) -> dict[Literal["replicate", "shard"], int]:
        """The mesh of a unit: its own mesh, or else the plan's."""
        return unit.mesh or self.mesh

    def is_replicated(self, unit: UnitPlan) -> bool:
        """Whether every rank keeps all parameters of the unit (torch's `replicate`)."""
        mesh = self.mesh_of(unit)
        return bool(mesh) and "shard" not in mesh

    @property
    def num_other_ranks(self) -> int:
        """Ranks of other parallelism (tensor, pipeline) for each data-parallel rank."""
        covered = math.prod(self.mesh.values())
        return self.world_size // covered if self.mesh and self.world_size else 1

    @property
    def has_other_dimensions(self) -> bool:
        """Whether the ranks do more than data parallelism, or units have separate meshes."""
        return self.num_other_ranks > 1 or any(unit.mesh for unit in self.units)

    def change(self, names: Iterable[str], **settings: Any) -> Self:
        """A copy of the plan with changed settings of some units (fields of `UnitPlan`)."""
        wanted = {self.unit(name).name for name in names}
        return self._with_units(
            unit.model_copy(update=settings) if unit.name in wanted else unit for unit in self.units
        )

    def split(self, name: str, parts: Sequence[Sequence[str]]) -> Self:
        """A copy of the plan with one unit split into several units that inherit its settings.

        Args:
            name: The unit to split.
            parts: The modules of each new unit, for example
                `[["layers.0.attention_norm", "layers.0.attention"], [...]]`. Include all modules
                with parameters of the old unit, so that no unit with only norms is left
                (`find_risks` warns about such a unit).
        """
        old = self.unit(name)
        if not parts:
            raise PlanError(f"The unit {name!r} is split into no parts. Name at least one part.")
        new = [old.model_copy(update={"modules": tuple(part)}) for part in parts]
        return self._with_units(
            piece for unit in self.units for piece in (new if unit is old else [unit])
        )

    @property
    def fsdp_roots(self) -> frozenset[str]:
        """The names of the units without another unit around them.

        torch makes them FSDP roots, whose default is to keep the parameters after forward. A plan
        may have several, and an FSDP root need not be the model itself.
        """
        return frozenset(name for name, root in self.root_of_units.items() if name == root)

    @property
    def root_of_units(self) -> dict[str, str]:
        """The FSDP root of each unit: the outermost unit around it, or the unit itself."""
        return dict(_nesting_of(self.units).root_of)

    @property
    def inner_units(self) -> tuple[UnitPlan, ...]:
        """The units that can be changed one by one: all but roots with units inside them."""
        is_inner = _nesting_of(self.units).is_inner
        return tuple(unit for unit, inner in zip(self.units, is_inner, strict=True) if inner)

    def merge(self, names: Sequence[str]) -> Self:
        """A copy of the plan with several units merged to one, with the settings of the first.

        Name the units in the order in which their modules run: the input of the first module
        decides when torch reduces the gradients of the whole unit (see `find_risks`).
        """
        units = [self.unit(name) for name in names]
        if not units:
            raise PlanError("No units to merge. Name at least two units of the plan.")
        modules = tuple(module for unit in units for module in unit.modules)
        merged = units[0].model_copy(update={"modules": modules})
        gone = {unit.name for unit in units[1:]}
        return self._with_units(
            merged if unit is units[0] else unit for unit in self.units if unit.name not in gone
        )

    def resolve(self, modules: Iterable[str]) -> Self:
        """The plan for one model: patterns become names, units follow the model's order.

        Args:
            modules: The names of the model's modules, in the order of `named_modules()`.

        Raises:
            PlanError: The plan names a module or unit that does not exist, or names one twice. The
                error suggests similar names.
        """
        order = {name: position for position, name in enumerate(modules)}
        named = {module for unit in self.units for module in unit.modules if "*" not in module}
        units = [piece for unit in self.units for piece in _resolve_unit(unit, order, named)]
        units.sort(key=lambda unit: order[unit.modules[0]])
        checkpointing = Checkpointing(
            full=_resolve_names(self.checkpointing.full, order),
            selective=_resolve_names(self.checkpointing.selective, order),
        )
        resolved = self._with_units(units, checkpointing=checkpointing)
        resolved._check_prefetch_names()
        return resolved

    def within(self, module: str) -> Self:
        """The part of the plan inside one module, with names relative to that module.

        A recording of a wrapper, or of several models, has names such as `actor.layers.0`. The
        actor alone takes `plan.within("actor")`.

        Args:
            module: A module of the recorded model.

        Raises:
            PlanError: The plan has no unit in this module.
        """
        units = [unit for unit in self.units if all(_is_inside(m, module) for m in unit.modules)]
        if not units:
            raise PlanError(
                f"The plan has no unit in the module {module!r}. Expected a module that contains "
                f"units. Its units are {', '.join(map(repr, self.unit_names[:4]))}."
            )
        inner = [
            unit.model_copy(update={"modules": _inside_names(unit.modules, module)})
            for unit in units
        ]
        prefetch = {
            name: value
            if isinstance(value, int)
            else {
                _inside_name(unit, module): _inside_names(targets, module)
                for unit, targets in value.items()
                if _is_inside(unit, module)
            }
            for name in ("forward_prefetch", "backward_prefetch")
            for value in (getattr(self, name),)
        }
        checkpointing = Checkpointing(
            full=_inside_names(self.checkpointing.full, module),
            selective=_inside_names(self.checkpointing.selective, module),
        )
        return self._with_units(inner, checkpointing=checkpointing, **prefetch)

    def prefetch_lists(
        self, direction: Literal["forward", "backward"], *, without: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """The names of the units that each unit prefetches; units without a prefetch are missing.

        Requires a resolved plan. A depth of k means the next k units in the order in which torch
        enters them: a unit before the units nested in it, in backward as well. A depth skips the
        units in `without`, which manage no parameters.
        """
        prefetch = self.forward_prefetch if direction == "forward" else self.backward_prefetch
        if isinstance(prefetch, dict):
            return {name: list(targets) for name, targets in prefetch.items() if targets}
        return lists_of_depth(self.units, direction, prefetch, without=without)

    def find_risks(
        self,
        parameters: Mapping[str, Sequence[int]],
        *,
        inputs_without_gradient: Collection[str] = (),
    ) -> list[str]:
        """Settings that torch accepts but that cost time or memory, one warning for each.

        Requires a resolved plan.

        Args:
            parameters: Shape of each parameter, by name.
            inputs_without_gradient: Modules whose inputs need no gradient, such as an embedding
                of token ids.
        """
        owned = owned_parameters(self.units, parameters)
        risks = [
            text
            for unit in self.units
            if (text := _norms_left_behind(unit, owned[unit.name], parameters))
        ]
        for unit in self.units:
            if len(unit.modules) > 1 and unit.modules[0] in inputs_without_gradient:
                risks.append(
                    f"Unit {unit.name!r} begins with {unit.modules[0]!r}, whose input needs no "
                    "gradient. Torch then reduces the gradients of the whole unit at the end of "
                    "backward, where no compute hides the reduction. Make that module a separate "
                    "unit."
                )
        return risks

    def with_values(self, **changes: Any) -> Self:
        """A copy with other fields, of which each is valid alone: only shared rules are checked.

        Raises:
            PlanError: The fields do not fit together.
        """
        changed = self.model_copy(update=changes)
        try:
            changed._check_rules()
        except ValueError:  # the message of a whole validation also names the place
            fields = {name: getattr(changed, name) for name in type(self).model_fields}
            return self.from_dict(fields)
        return changed

    def _with_units(self, units: Iterable[UnitPlan], **changes: Any) -> Self:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return self.from_dict({**fields, "units": tuple(units), **changes})

    def _check_prefetch_names(self) -> None:
        names = set(self.unit_names)
        for prefetch in (self.forward_prefetch, self.backward_prefetch):
            if isinstance(prefetch, dict):
                for name in [
                    *prefetch,
                    *(name for targets in prefetch.values() for name in targets),
                ]:
                    if name not in names:
                        self.unit(name)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_rules()
        return self

    def _check_rules(self) -> None:
        """Check the rules between fields.

        Raises:
            ValueError: A rule is broken.
        """
        if not self.units:
            raise ValueError("A plan has no units. Expected at least one")
        _check_unique(self.units)
        for mesh in (self.mesh, *(unit.mesh for unit in self.units)):
            _check_mesh(mesh, self.world_size)
        for unit in self.units:
            shard = self.mesh_of(unit).get("shard")
            reshard = unit.reshard_after_forward
            if shard and type(reshard) is int and shard % reshard:
                raise ValueError(
                    f"reshard_after_forward of unit {unit.name!r} is {reshard}. Expected true, "
                    f"false or a divisor of the {shard} ranks that shard: {_divisors(shard)}"
                )
        for complaint in _complaints_of_fsdp1(self) if self.fsdp1 is not None else ():
            raise ValueError(complaint)


SETTINGS = tuple(name for name in UnitPlan.model_fields if name != "modules")
"""The settings of a unit."""
_OF_FSDP1 = ("modules", "reshard_after_forward", "param_dtype", "reduce_dtype", "offload")
"""The fields of a unit that a wrapper of FSDP1 has, too."""

DECIDED_BY_PLAN = (
    "plan",
    "wrap",
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
    "param_dtype",
    "reduce_dtype",
    "mesh",
    "offload",
    "reshard_after_backward",
    "unshard_async_op",
    "reduce_scatter_buffers",
    "separate_reduce_scatter_group",
    "checkpointing",
    "microbatches",
    "accumulation_sync",
)
"""The trainer's settings that a plan replaces: with a plan, their values are ignored."""

_LEGAL_KEYS = {
    "": tuple(Plan.model_fields),
    "units": tuple(UnitPlan.model_fields),
    "accumulation": tuple(Accumulation.model_fields),
    "checkpointing": tuple(Checkpointing.model_fields),
    "fsdp1": tuple(Fsdp1Settings.model_fields),
}


def check_reshard_sizes(plan: Plan, shard: int) -> None:
    """Check that every integer `reshard_after_forward` divides the number of ranks that shard.

    A plan whose mesh defines that number checks this itself.

    Args:
        plan: The plan.
        shard: The number of ranks that shard the units without a separate mesh.

    Raises:
        PlanError: A value does not divide the number of ranks.
    """
    for unit in plan.units:
        size, ranks = unit.reshard_after_forward, unit.num_shards(shard)
        if type(size) is int and ranks % size:
            raise PlanError(
                f"reshard_after_forward of unit {unit.name!r} is {size}, and {ranks} ranks shard. "
                f"Expected true, false or a divisor of {ranks}: {_divisors(ranks)}. Change it."
            )


def entry_order(units: Sequence[UnitPlan], direction: Literal["forward", "backward"]) -> list[str]:
    """The names of the units in the order in which a pass enters them.

    Both passes enter a unit before the units nested in it. Forward follows the model's order,
    backward the reverse order.
    """
    nesting = _nesting_of(units)
    return list(nesting.forward if direction == "forward" else nesting.backward)


def lists_of_depth(
    units: Sequence[UnitPlan],
    direction: Literal["forward", "backward"],
    depth: int,
    *,
    without: Collection[str] = (),
) -> dict[str, list[str]]:
    """Prefetch lists in which each unit prefetches the next `depth` units of `prefetch_orders`.

    Args:
        units: Names, no patterns.
        direction: The pass.
        depth: The number of units to prefetch.
        without: Units that are skipped, because they manage no parameters.
    """
    if depth == 0:
        return {}
    return {
        name: order[position + 1 : position + 1 + depth]
        for order in prefetch_orders(units, direction, without=without)
        for position, name in enumerate(order[:-1])
    }


def prefetch_orders(
    units: Sequence[UnitPlan],
    direction: Literal["forward", "backward"],
    *,
    without: Collection[str],
) -> list[list[str]]:
    """The orders of units within which one prefetches the next; arguments as `lists_of_depth`.

    Each is within an FSDP root with units inside it, because another root is another model: what
    is gathered for it too early misses its update. Units without such a root are one order.
    """
    root_of = _nesting_of(units).root_of
    around = {root for name, root in root_of.items() if name != root}
    orders: dict[str | None, list[str]] = {}
    for name in entry_order(units, direction):
        if name not in without:
            root = root_of[name] if root_of[name] in around else None
            orders.setdefault(root, []).append(name)
    return list(orders.values())


class _Nesting(NamedTuple):
    """How the units of a plan contain each other. It depends on their modules only."""

    root_of: Mapping[str, str]
    """The FSDP root of each unit: the outermost unit around it, or the unit itself."""
    is_inner: Sequence[bool]
    """Whether each unit can be changed alone; see `Plan.inner_units`."""
    forward: Sequence[str]
    """The names of the units in the order in which a forward enters them."""
    backward: Sequence[str]


def _nesting_of(units: Iterable[UnitPlan]) -> _Nesting:
    return _nesting_of_modules(tuple(unit.modules for unit in units))


@lru_cache(maxsize=256)
def _nesting_of_modules(modules: tuple[tuple[str, ...], ...]) -> _Nesting:
    names = [", ".join(own) for own in modules]
    of_module = {each: name for name, own in zip(names, modules, strict=True) for each in own}
    around_any = {each for own in modules for each in modules_around(own[0])}
    root_of: dict[str, str] = {}
    children: dict[str | None, list[str]] = {}
    for name, own in zip(names, modules, strict=True):
        around = [of_module[each] for each in modules_around(own[0]) if each in of_module]
        root_of[name] = around[0] if around else name
        children.setdefault(around[-1] if around else None, []).append(name)

    def walk(parent: str | None, step: int) -> Iterator[str]:
        for child in children.get(parent, [])[::step]:
            yield child
            yield from walk(child, step)

    is_inner = tuple(
        own != (ROOT,) and (root_of[name] != name or around_any.isdisjoint(own))
        for name, own in zip(names, modules, strict=True)
    )
    # Backward enters the units in the reverse of the order in which forward leaves them.
    return _Nesting(root_of, is_inner, tuple(walk(None, 1)), tuple(walk(None, -1)))


def owned_parameters(units: Sequence[UnitPlan], parameters: Iterable[str]) -> dict[str, list[str]]:
    """The parameters that each unit manages: all of its modules except those of inner units."""
    owned: dict[str, list[str]] = {unit.name: [] for unit in units}
    owner_of = {module: unit.name for unit in units for module in unit.modules}
    for parameter in parameters:
        owner = find_owner(parameter, owner_of)
        if owner is not None:
            owned[owner].append(parameter)
    return owned


def find_owner(parameter: str, owner_of: Mapping[str, T]) -> T | None:
    """The owner of the innermost module around a parameter; None if no module has an owner.

    Args:
        parameter: The name of the parameter.
        owner_of: The owner of each module that has one.
    """
    module = parameter.rpartition(".")[0]
    while module not in owner_of and module != ROOT:
        module = module.rpartition(".")[0]
    return owner_of.get(module)


def _check_module_name(module: str) -> None:
    if module and not re.fullmatch(r"[^.{}\s,]+(\.[^.{}\s,]+)*", module):
        raise ValueError(
            f"Invalid module name {module!r}. Expected segments separated by dots, such as "
            "'layers.0.ffn'; an empty name is the model itself"
        )


def _check_group(modules: Sequence[str]) -> None:
    if ROOT in modules:
        raise ValueError(
            f"The unit {quote_all(modules)} groups the model itself with its parts. Expected only "
            "the empty name: the root unit takes all parameters that no other unit has"
        )
    for module in modules:
        for other in modules:
            if other.startswith(f"{module}."):
                raise ValueError(
                    f"A unit groups {module!r} with its submodule {other!r}. Name only the "
                    "outer module, or make them two units"
                )
    if len({module.count("*") for module in modules}) > 1:
        raise ValueError(
            f"The unit {quote_all(modules)} mixes patterns with different numbers of stars. "
            "Expected the same number of stars in each pattern"
        )


def _complaints_of_fsdp1(plan: Plan) -> Iterator[str]:
    """What a plan has that a wrapper of FSDP1 does not have."""
    for unit in plan.units:
        of_unit, reshard = f"of unit {unit.name!r} is", unit.reshard_after_forward
        if len(unit.modules) > 1:
            yield (
                f"The unit {unit.name!r} has {len(unit.modules)} modules. FSDP1 wraps one module "
                "for each unit. Expected one"
            )
        for name, default in plan_text.defaults_of(UnitPlan).items():
            if name not in _OF_FSDP1 and (value := getattr(unit, name)) != default:
                yield f"{name} {of_unit} {value!r}. FSDP1 has no such setting. Expected {default!r}"
        if type(reshard) is int:
            yield (
                f"reshard_after_forward {of_unit} {reshard}. FSDP1 cannot reshard to a part of the "
                "ranks. Expected true or false"
            )
        if unit.is_root and reshard:
            yield f'reshard_after_forward {of_unit} true. FSDP1 keeps the root. Expected "auto"'
    if plan.forward_prefetch not in (0, 1):
        yield (
            f"forward_prefetch is {plan.forward_prefetch!r}. FSDP1 prefetches at most the next "
            "unit. Expected 0 or 1"
        )
    if plan.backward_prefetch != 0:
        yield (
            f"backward_prefetch is {plan.backward_prefetch!r}. FSDP1 prefetches the previous unit "
            "or none. Expected 0, and backward_prefetch in [fsdp1]"
        )
    if plan.accumulation.sync == "all_reduce_last":
        yield (
            'The accumulation has sync = "all_reduce_last". FSDP1 reduces over the replicas '
            'whenever it reduces. Expected "every" or "last"'
        )


def _check_unique(units: Sequence[UnitPlan]) -> None:
    seen: dict[str, str] = {}
    for unit in units:
        for module in unit.modules:
            if module in seen:
                raise ValueError(
                    f"Module {module!r} is in two units, {seen[module]!r} and {unit.name!r}. "
                    "A module can only be in one unit: remove it from the other"
                )
            seen[module] = unit.name


def _check_mesh(mesh: Mapping[Any, int], world_size: int | None) -> None:
    if world_size and world_size % math.prod(mesh.values()):
        raise ValueError(
            f"A mesh of {' x '.join(map(str, mesh.values()))} ranks does not fit a world size of "
            f"{world_size}. Expected their product to divide it"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(2, number + 1) if number % d == 0)


def _resolve_unit(
    unit: UnitPlan, order: Mapping[str, int], named: Collection[str]
) -> list[UnitPlan]:
    if not unit.is_pattern:
        for module in unit.modules:
            _expect(module, order)
        return [unit]
    units = []
    for stars in _matches(unit.modules[0], order):
        modules = tuple(_fill(module, stars) for module in unit.modules)
        if not any(module in named for module in modules):
            for module in modules:
                _expect(module, order)
            units.append(unit.model_copy(update={"modules": modules}))
    return units


def _resolve_names(names: Iterable[str], order: Mapping[str, int]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        if "*" in name:
            found += [_fill(name, stars) for stars in _matches(name, order)]
        else:
            _expect(name, order)
            found.append(name)
    return tuple(sorted(dict.fromkeys(found), key=lambda name: order[name]))


def _is_inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _inside_name(name: str, module: str) -> str:
    """A name, or the names of a unit, relative to a module."""
    parts = name.split(", ")
    return ", ".join(part.removeprefix(module).removeprefix(".") for part in parts)


def _inside_names(names: Iterable[str], module: str) -> tuple[str, ...]:
    """The names inside a module, relative to it."""
    return tuple(_inside_name(name, module) for name in names if _is_inside(name, module))


def _matches(pattern: str, order: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The segments that the stars of a pattern match, for each match, in the model's order."""
    segments = "([^.]*)".join(re.escape(piece) for piece in pattern.split("*"))
    matches = [found.groups() for name in order if (found := re.fullmatch(segments, name))]
    if not matches:
        raise PlanError(
            f"The plan's pattern {pattern!r} matches no module of the model. "
            f"{suggest(pattern, list(order), what='modules')} A star matches one segment of a "
            "name. Correct the pattern."
        )
    return matches


def _fill(pattern: str, stars: Sequence[str]) -> str:
    pieces = pattern.split("*")
    return pieces[0] + "".join(star + piece for star, piece in zip(stars, pieces[1:], strict=True))


def _expect(module: str, order: Mapping[str, int]) -> None:
    if module not in order:
        raise PlanError(
            f"The plan names module {module!r}, which the model does not have. "
            f"{suggest(module, list(order), what='modules')} Correct the name, or use a plan "
            "that was made for this model."
        )


def _norms_left_behind(
    unit: UnitPlan, owned: Sequence[str], parameters: Mapping[str, Sequence[int]]
) -> str | None:
    """Warn about a unit that holds only vectors, often because inner units took the rest."""
    if not owned or any(len(parameters[name]) > 1 for name in owned):
        return None
    kept = quote_all(owned[:3]) + (", ..." if len(owned) > 3 else "")
    return (
        f"Unit {unit.name or '(root)'!r} holds only vectors ({kept}). Its collectives cost latency "
        "and are too small to be worth a unit. Put each norm in the unit of the module after it, "
        "for example ['attention_norm', 'attention']."
    )


def modules_around(module: str) -> Iterator[str]:
    """The modules around a module, the model itself included."""
    if module == ROOT:
        return
    yield ROOT
    parts = module.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))
