"""How is a model sharded, as a file that can be read, changed and applied?

A plan lists the `fully_shard` calls (units) with their settings, the mesh, the prefetch order and
what the training loop does around them. It knows module names, not modules: `sharding.apply_plan`
gives it to a model, `sharding.observe_plan` reads it from one. None means "left to torch", written
"auto" in the file.

Module names are fully qualified, without wrapper segments; the model itself is the empty name.
`*` stands for one segment of a name: `layers.*` is one unit for each block, and
`["layers.*.ffn_norm", "layers.*.ffn"]` is one unit of two modules for each block. A module that
is named in full elsewhere is left out of a pattern. In the file, `layers.{0..7}` means the eight
names; `plan_text` has the file's form.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from fsdp_inspect.error_text import describe_validation_error, quote_all, suggest
from fsdp_inspect.errors import PlanError
from fsdp_inspect.trace import plan_text

PLAN_VERSION = 1
"""Raised when an older reader would misread a newer plan."""

ROOT = ""
"""The model itself."""

AccumulationSync = Literal["every", "last", "all_reduce_last"]
FloatDtype = Literal["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]


def _check_reshard(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(
        f"reshard_after_forward is {value!r}. Expected true, false, the number of ranks that "
        'keep a copy together, or "auto"'
    )


def _check_prefetch(value: Any) -> Any:
    is_depth = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_table = isinstance(value, Mapping) and all(
        isinstance(targets, list | tuple) for targets in value.values()
    )
    if is_depth or is_table:
        return value or 0
    raise ValueError(
        f"A prefetch is {value!r}. Expected how many units ahead to gather (0: torch's own "
        "order), or a table from a unit's name to the names of the units that it gathers early"
    )


Reshard = Annotated[bool | int | None, BeforeValidator(_check_reshard)]
Prefetch = Annotated[int | dict[str, tuple[str, ...]], BeforeValidator(_check_prefetch)]


class PlanRecord(BaseModel):
    """Base of what a plan is made of: unknown keys are refused, values never change."""

    # Instances are checked again when one is built from another: `change` must not smuggle.
    model_config = ConfigDict(extra="forbid", frozen=True, revalidate_instances="always")


class UnitPlan(PlanRecord):
    """One `fully_shard` call, or one for each match of a pattern."""

    modules: tuple[str, ...]
    """The modules that are gathered together; several make `fully_shard([a, b])`."""
    reshard_after_forward: Reshard = None
    """An int is the size of the group that keeps a whole copy; None: True, but False at the
    root."""
    reshard_after_backward: StrictBool = True
    unshard_in_backward: StrictBool = True
    unshard_async_op: StrictBool = False
    """Gather on the compute stream; needs explicit prefetch to overlap."""
    reduce_scatter_max_input_buffers: PositiveInt = 1
    separate_reduce_scatter_group: StrictBool = False
    """Reduce-scatter on a communicator of its own, beside the all-gathers."""
    param_dtype: FloatDtype | None = None
    """Of all-gather and compute; None: as the parameters are."""
    reduce_dtype: FloatDtype | None = None
    """Of gradient reduction; None: as torch decides (2.13: the compute dtype)."""
    output_dtype: FloatDtype | None = None
    cast_forward_inputs: StrictBool = True
    offload: Literal["none", "cpu", "cpu_pinned"] = "none"
    """Where sharded parameters, gradients and optimizer state live."""

    @property
    def name(self) -> str:
        """As torch names the unit: its modules joined by a comma; the root is empty."""
        return ", ".join(self.modules)

    @property
    def is_root(self) -> bool:
        """Whether it is the model itself."""
        return self.modules == (ROOT,)

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for one unit per match."""
        return any("*" in module for module in self.modules)

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
    """How many microbatches make a step, and when their gradients are reduced."""

    microbatches: PositiveInt = 1
    sync: AccumulationSync = "every"
    """`every` microbatch; only the `last` (gradients stay unsharded until then); or, under HSDP,
    reduce-scatter every time and all-reduce the last time."""


class Checkpointing(PlanRecord):
    """Which modules forget their activations in forward and recompute them in backward."""

    full: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()
    """Results of matrix products and attention are kept, the rest is recomputed."""


class Plan(PlanRecord):
    """How a model is sharded: units, mesh, prefetch, and the training loop around them."""

    version: Literal[1] = 1
    units: tuple[UnitPlan, ...]
    """In any order: torch is called for inner modules first."""
    world_size: PositiveInt | None = None
    mesh: dict[Literal["replicate", "shard"], PositiveInt] = Field(default_factory=dict)
    """Ranks along each dimension, outermost first; empty: all ranks shard."""
    forward_prefetch: Prefetch = 0
    """How many units ahead are gathered early, in the order of the model's modules; or, by unit,
    which. 0: torch's own order."""
    backward_prefetch: Prefetch = 0
    """As `forward_prefetch`, in the reverse order."""
    accumulation: Accumulation = Accumulation()
    checkpointing: Checkpointing = Checkpointing()
    notes: tuple[str, ...] = ()
    """What the observed model has and a plan cannot say."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan file.

        Raises:
            PlanError: There is no such file, or it is not a plan; says what and where.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"No plan can be read from {str(path)!r}: {error}. Expected a TOML file as "
                "written by Plan.dump. Name an existing plan file."
            ) from error
        try:
            return cls.from_toml(text)
        except PlanError as error:
            raise PlanError(f"The plan {str(path)!r} cannot be used. {error}") from error

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read a plan from the text of a plan file."""
        return cls.from_dict(plan_text.parse(text))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Read a plan from plain values, such as a run manifest's `plan`."""
        version = fields.get("version", PLAN_VERSION)
        if isinstance(version, int) and version > PLAN_VERSION:
            raise PlanError(
                f"It has version {version}; this version reads up to {PLAN_VERSION}. "
                "Update fsdp-inspect."
            )
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            complaint = describe_validation_error(error, legal_keys=_LEGAL_KEYS)
            raise PlanError(f"{complaint} Correct the plan.") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: what `from_dict` reads."""
        return self.model_dump(mode="json")

    def to_toml(self) -> str:
        """The text of a plan file; `from_toml` gives the same plan again."""
        return plan_text.render(self.model_dump(mode="python"), plan_text.defaults_of(UnitPlan))

    def dump(self, path: str | Path) -> None:
        """Write a plan file; an existing one is replaced as a whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        unfinished.write_text(self.to_toml(), encoding="utf-8")
        unfinished.replace(path)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The names of the units, in the plan's order."""
        return tuple(unit.name for unit in self.units)

    def unit(self, name: str) -> UnitPlan:
        """The unit of that name.

        Raises:
            PlanError: There is none; names the nearest ones.
        """
        for unit in self.units:
            if unit.name == name:
                return unit
        raise PlanError(
            f"The plan has no unit {name!r}. {suggest(name, self.unit_names, what='units')} "
            "Name one of its units."
        )

    def change(self, names: Iterable[str], **settings: Any) -> Self:
        """The same plan with other settings of some units (fields of `UnitPlan`)."""
        wanted = {self.unit(name).name for name in names}
        return self._with_units(
            unit.model_copy(update=settings) if unit.name in wanted else unit for unit in self.units
        )

    def split(self, name: str, parts: Sequence[Sequence[str]]) -> Self:
        """The same plan with a unit cut into several that inherit its settings.

        Args:
            name: The unit to cut.
            parts: The modules of each new unit, for example
                `[["layers.0.attention_norm", "layers.0.attention"], [...]]`. All parameters of
                the old unit must belong to one of them, so that no unit of norms alone is left
                (`find_risks` says so when one is).
        """
        old = self.unit(name)
        if not parts:
            raise PlanError(f"The unit {name!r} is split into nothing. Name at least one part.")
        new = [old.model_copy(update={"modules": tuple(part)}) for part in parts]
        return self._with_units(
            piece for unit in self.units for piece in (new if unit is old else [unit])
        )

    def merge(self, names: Sequence[str]) -> Self:
        """The same plan with several units made one, which takes the settings of the first.

        The order of the names is the order in which their modules run: with the first one's
        input torch decides when the whole unit reduces its gradients (see `find_risks`).
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
        """The same plan for one model: patterns become names, units stand in the model's order.

        Args:
            modules: The names of the model's modules, in the order of `named_modules()`.

        Raises:
            PlanError: The plan names a module or unit that does not exist (says the nearest
                ones), or names one twice.
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

    def prefetch_lists(
        self, direction: Literal["forward", "backward"], *, without: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """Which units each unit gathers early, by name; units that gather none are left out.

        Expects a resolved plan. A depth of k means the next k units in the order in which torch
        enters them: a unit before those nested in it, in backward as well. `without` names units
        that manage no parameters, which a depth passes over.
        """
        prefetch = self.forward_prefetch if direction == "forward" else self.backward_prefetch
        if isinstance(prefetch, dict):
            return {name: list(targets) for name, targets in prefetch.items() if targets}
        order = [name for name in entry_order(self.units, direction) if name not in without]
        return lists_of_depth(order, prefetch)

    def find_risks(
        self,
        parameters: Mapping[str, Sequence[int]],
        *,
        inputs_without_gradient: Collection[str] = (),
    ) -> list[str]:
        """What torch would accept and its user regret, one sentence each.

        Expects a resolved plan.

        Args:
            parameters: Shape of each parameter, by name.
            inputs_without_gradient: Modules whose inputs need no gradient (an embedding gets
                token ids).
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
                    "gradient: torch then reduces the gradients of the whole unit at the end of "
                    "backward, where nothing hides it. Give that module a unit of its own."
                )
        return risks

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

    @field_validator("mesh", mode="after")
    @classmethod
    def _order_mesh(cls, mesh: dict[str, int]) -> dict[str, int]:
        return {name: mesh[name] for name in ("replicate", "shard") if name in mesh}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.units:
            raise ValueError("A plan has no units. Expected at least one")
        _check_unique(self.units)
        _check_mesh(self.mesh, self.world_size)
        shard = self.mesh.get("shard")
        for unit in self.units:
            reshard = unit.reshard_after_forward
            if shard and type(reshard) is int and shard % reshard:
                raise ValueError(
                    f"reshard_after_forward of unit {unit.name!r} is {reshard}. Expected true, "
                    f"false or a divisor of the {shard} ranks that shard: {_divisors(shard)}"
                )
        return self


SETTINGS = tuple(name for name in UnitPlan.model_fields if name != "modules")
"""What can be set for a unit."""

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
"""The trainer's settings that a plan says: their values mean nothing under one."""

_LEGAL_KEYS = {
    "": tuple(Plan.model_fields),
    "units": tuple(UnitPlan.model_fields),
    "accumulation": tuple(Accumulation.model_fields),
    "checkpointing": tuple(Checkpointing.model_fields),
}


def check_reshard_sizes(plan: Plan, shard: int) -> None:
    """See to it that the groups that keep a whole copy divide the ranks that shard.

    A plan checks that itself where its mesh tells these ranks.

    Raises:
        PlanError: One does not.
    """
    for unit in plan.units:
        size = unit.reshard_after_forward
        if type(size) is int and shard % size:
            raise PlanError(
                f"reshard_after_forward of unit {unit.name!r} is {size}, and {shard} ranks shard. "
                f"Expected true, false or a divisor of {shard}: {_divisors(shard)}. Change it."
            )


def entry_order(units: Sequence[UnitPlan], direction: Literal["forward", "backward"]) -> list[str]:
    """The names of the units in the order in which a pass enters them.

    Forward enters a unit before those nested in it, and units as the model lists them; backward
    enters a unit before those nested in it too, and units in the reverse order.
    """
    # Backward is the mirror image of the order in which forward leaves the units.
    parents = {unit.name: _parent(unit, units) for unit in units}
    children: dict[str | None, list[str]] = {}
    for unit in units:
        children.setdefault(parents[unit.name], []).append(unit.name)

    def walk(parent: str | None) -> list[str]:
        siblings = children.get(parent, [])
        if direction == "backward":
            siblings = siblings[::-1]
        return [name for sibling in siblings for name in (sibling, *walk(sibling))]

    return walk(None)


def lists_of_depth(order: Sequence[str], depth: int) -> dict[str, list[str]]:
    """Prefetch lists in which each unit names the next `depth` units of an order."""
    if depth == 0:
        return {}
    return {
        name: list(order[position + 1 : position + 1 + depth])
        for position, name in enumerate(order[:-1])
    }


def owned_parameters(units: Sequence[UnitPlan], parameters: Iterable[str]) -> dict[str, list[str]]:
    """The parameters that each unit manages: those of its modules, less those of inner units."""
    owned: dict[str, list[str]] = {unit.name: [] for unit in units}
    owner_of = {module: unit.name for unit in units for module in unit.modules}
    for parameter in parameters:
        module = parameter.rpartition(".")[0]
        while module not in owner_of and module:
            module = module.rpartition(".")[0]
        if module in owner_of:
            owned[owner_of[module]].append(parameter)
    return owned


def _check_module_name(module: str) -> None:
    if module and not re.fullmatch(r"[^.{}\s,]+(\.[^.{}\s,]+)*", module):
        raise ValueError(
            f"{module!r} is not a module's name. Expected segments with dots between them, such "
            "as 'layers.0.ffn'; an empty name is the model itself"
        )


def _check_group(modules: Sequence[str]) -> None:
    if ROOT in modules:
        raise ValueError(
            f"The unit {quote_all(modules)} groups the model itself with its parts. Expected the "
            "empty name alone: it takes all that no other unit has"
        )
    for module in modules:
        for other in modules:
            if other.startswith(f"{module}."):
                raise ValueError(
                    f"A unit groups {module!r} with {other!r}, which is part of it. Name the "
                    "outer module alone, or make them two units"
                )
    if len({module.count("*") for module in modules}) > 1:
        raise ValueError(
            f"The unit {quote_all(modules)} mixes patterns that do not have the same number of "
            "stars. Expected each pattern to have as many, so that they match together"
        )


def _check_unique(units: Sequence[UnitPlan]) -> None:
    seen: dict[str, str] = {}
    for unit in units:
        for module in unit.modules:
            if module in seen:
                raise ValueError(
                    f"Module {module!r} is in two units, {seen[module]!r} and {unit.name!r}. "
                    "A module can be sharded once: keep it in one of them"
                )
            seen[module] = unit.name


def _check_mesh(mesh: Mapping[Any, int], world_size: int | None) -> None:
    if not mesh:
        return
    if "shard" not in mesh:
        raise ValueError("The mesh has no 'shard' dimension. Expected { shard = N }")
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


def _matches(pattern: str, order: Mapping[str, int]) -> list[tuple[str, ...]]:
    """What the stars of a pattern stand for in each matching name, in the model's order."""
    segments = "([^.]*)".join(re.escape(piece) for piece in pattern.split("*"))
    matches = [found.groups() for name in order if (found := re.fullmatch(segments, name))]
    if not matches:
        raise PlanError(
            f"The plan's pattern {pattern!r} matches no module of the model. "
            f"{suggest(pattern, list(order), what='modules')} A star stands for one segment of a "
            "name: correct the pattern."
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


def _parent(unit: UnitPlan, units: Iterable[UnitPlan]) -> str | None:
    """The innermost other unit that holds the first module of this one."""
    best: tuple[int, str] | None = None
    for other in units:
        for module in other.modules:
            inside = module == ROOT or unit.modules[0].startswith(f"{module}.")
            if other is not unit and inside and (best is None or len(module) > best[0]):
                best = (len(module), other.name)
    return best[1] if best else None


def _norms_left_behind(
    unit: UnitPlan, owned: Sequence[str], parameters: Mapping[str, Sequence[int]]
) -> str | None:
    """A unit that holds only vectors, often since inner units took the rest."""
    if not owned or any(len(parameters[name]) > 1 for name in owned):
        return None
    kept = quote_all(owned[:3]) + (", ..." if len(owned) > 3 else "")
    return (
        f"Unit {unit.name or '(root)'!r} is left with vectors alone ({kept}): its collectives "
        "cost latency and hide nothing. Name each norm together with the module that it feeds, "
        "for example ['attention_norm', 'attention']."
    )
