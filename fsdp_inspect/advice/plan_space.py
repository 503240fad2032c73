"""Define the plans that the search tries: the recorded plan with some settings changed.

A `Choice` names only the changed settings. So a simpler plan is one with fewer changes, and the
gain of a plan can be split by change.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from fsdp_inspect.advice.setting_findings import LARGE_PART_RATIO
from fsdp_inspect.analysis.verdict.facts import OVERSIZED_RATIO
from fsdp_inspect.errors import PlanError
from fsdp_inspect.formatting import format_unit, listed
from fsdp_inspect.simulation.changes import (
    BLOCK,
    checkpoint,
    resized,
    split_units,
    with_units,
    wrap,
)
from fsdp_inspect.simulation.parameters import is_inside
from fsdp_inspect.simulation.recorded import Execution, RecordedWork
from fsdp_inspect.simulation.workload import Op
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.plan import (
    ROOT,
    BackwardPrefetch,
    FloatDtype,
    Plan,
    UnitPlan,
    owned_parameters,
)
from fsdp_inspect.trace.run import Unit

ROOT_PARTS = "make units of large modules of the root"
"""The begin of the description of these units."""
Sync = Literal["every", "last", "all_reduce_last"]
GROUP_SIZES = (1, 2, 3, 4, 6, 8)
"""Numbers of blocks in a unit."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Changes to the recorded plan; None keeps a setting as recorded."""

    grouping: str | None = None
    """A key of `Space.groupings`."""
    reshard: bool | int | None = None
    """After forward, for every unit but the root. An int is the size of the group that keeps the
    parameters."""
    num_kept: int | None = None
    """The number of last units that stay unsharded after forward."""
    keep_root: bool | None = None
    """Whether the root stays unsharded after forward."""
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    prefetch_moment: BackwardPrefetch | None = None
    """FSDP1: when backward gathers the next unit."""
    reduce_buffers: int | None = None
    separate_reduce_group: bool | None = None
    async_gathers: bool | None = None
    """Whether all-gathers return work to wait for (`unshard_async_op`)."""
    replicas: int | None = None
    """The number of copies of the model (HSDP)."""
    embedding_in_backward: bool | None = None
    """Whether embeddings are gathered for backward, which does not use their parameters."""
    accumulation_sync: Sync | None = None
    keep_between_microbatches: bool | None = None
    """Whether parameters stay unsharded after backward (`reshard_after_backward`)."""
    checkpointing: Literal["full"] | None = None
    """Activation checkpointing of every block: backward repeats its forward."""
    param_dtype: FloatDtype | None = None
    reduce_dtype: FloatDtype | None = None

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the changed settings."""
        return tuple(name for name in _SETTINGS if getattr(self, name) is not None)

    @property
    def effort(self) -> tuple[int, int]:
        """The number of changes, then the prefetch depth: lower is simpler."""
        depth = (self.forward_prefetch or 0) + (self.backward_prefetch or 0)
        return len(self.changed), depth

    def take(self, other: "Choice", names: Sequence[str]) -> "Choice":
        """This choice with some settings taken from another choice."""
        return replace(self, **{name: getattr(other, name) for name in names})


_SETTINGS = tuple(each.name for each in fields(Choice))
_OF_FSDP1 = frozenset(
    {
        "grouping",
        "reshard",
        "forward_prefetch",
        "prefetch_moment",
        "replicas",
        "accumulation_sync",
        "checkpointing",
        "param_dtype",
        "reduce_dtype",
    }
)
"""The settings that FSDP1 has, too."""


def _say_merged(*names: str) -> str:
    return f"make one unit of {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class Space:
    """The recorded plan, and other ways to make units of its modules."""

    plan: Plan
    """The recorded plan, resolved."""
    groupings: dict[str, Plan]
    """Plans by a description of the change. No plan adds a risk to those of the recorded plan."""
    holds_host: bool
    """The backend blocks the main thread until a collective ends. An early issue gains nothing
    unless gathers are asynchronous."""
    rules: dict[str, str]
    """The tuning rule of each grouping."""
    refused: Mapping[str, str]
    """Groupings that were left out, each with the risk that it would add."""
    reshards_root: bool
    """Whether a root unit reshards after forward."""
    embeddings: frozenset[str]
    """Units that contain only an embedding, and that backward gathers again."""
    without_backward: frozenset[str]
    """Frozen modules under a root that no backward runs, such as a teacher. Nothing reshards them
    if they stay unsharded after forward, so a moving average in them would never be gathered. Those
    that were seen not to change are in `unchanged`. The root stands for the whole model: forwards
    run between the last backward and the update, and what they leave unsharded misses it."""
    unchanged: frozenset[str]
    find_risks: Callable[[Plan], list[str]]
    """The risks of a plan for this model, one sentence each."""
    parameters: Mapping[str, Sequence[int]]
    """Shape of each parameter, by name."""
    named_by_script: frozenset[tuple[str, ...]]
    """The modules of each unit on which the script calls `unshard()`: it must stay a unit."""
    _plans: dict[Choice, Plan] = field(default_factory=dict)
    """The plans of choices without a prefetch, which other choices share."""
    _phrases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The phrases of a grouping with merged units."""

    def allows(self, choice: Choice) -> bool:
        """Whether the sharder of the run has the settings of a choice."""
        if self.plan.fsdp1 is None:
            return choice.prefetch_moment is None
        is_flag = choice.reshard is None or isinstance(choice.reshard, bool)
        return is_flag and _OF_FSDP1.issuperset(choice.changed) and choice.effort[1] < 2

    def can_prefetch(self, choice: Choice) -> bool:
        """Whether gathers can run in parallel with compute under a choice, and of another unit."""
        if not self.has_several_units(choice.grouping):
            return False
        is_async = any(unit.unshard_async_op for unit in self.plan.units)
        return not self.holds_host or (choice.async_gathers or is_async)

    def has_several_units(self, grouping: str | None) -> bool:
        """Whether there is another unit to prefetch."""
        return len((self.plan if grouping is None else self.groupings[grouping]).units) > 1

    def add_merge(self, grouping: str | None, first: str, second: str) -> str | None:
        """Add a grouping that merges two units of another grouping.

        Args:
            grouping: The grouping to change; None: the recorded one.
            first: A unit's name.
            second: The name of the unit that runs after it.

        Returns:
            Its key in `groupings`; None if it would add a risk, or if one is inside the other.
        """
        start = self.groupings[grouping] if grouping is not None else self.plan
        try:
            merged = with_units(start, start.merge([first, second]).units)
        except PlanError:
            return None  # one unit is inside the other
        if set(self.find_risks(merged)) - set(self.find_risks(self.plan)):
            return None
        if not self.named_by_script <= {unit.modules for unit in merged.units}:
            return None
        earlier = () if grouping is None else self._phrases.get(grouping, (grouping,))
        parts = format_unit(first), format_unit(second)
        replaced = {_say_merged(part) for part in parts}
        phrases = (*(each for each in earlier if each not in replaced), _say_merged(*parts))
        name = ", then ".join(phrases)
        self._phrases[name] = phrases
        self.groupings[name] = merged
        self.rules[name] = "R2" if grouping is None else self.rules[grouping]
        return name

    def plan_of(self, choice: Choice) -> Plan:
        """The recorded plan with the changes of a choice."""
        names = ("forward_prefetch", "backward_prefetch")
        depths = {name: depth for name in names if (depth := getattr(choice, name)) is not None}
        rest = replace(choice, **dict.fromkeys(names))
        plan = self._plans.get(rest)
        if plan is None:
            plan = self._plans[rest] = self._plan_of_units(rest)
        return plan.with_values(**depths) if depths else plan

    def _lacks_backward(self, unit: UnitPlan) -> bool:
        first = unit.modules[0]
        return any(first == each or is_inside(first, each) for each in self.without_backward)

    def _plan_of_units(self, choice: Choice) -> Plan:
        """The plan of a choice, which keeps the prefetch as recorded."""
        plan = self.groupings[choice.grouping] if choice.grouping is not None else self.plan
        inner = [unit for unit in plan.inner_units if not self._lacks_backward(unit)]
        reshards = _reshards(inner, choice)
        if choice.keep_root is not None:
            roots = [unit for unit in plan.units if unit.name in plan.fsdp_roots]
            reshards |= {
                unit.name: not choice.keep_root for unit in roots if not self._lacks_backward(unit)
            }
        units = [_changed(unit, choice, reshards.get(unit.name)) for unit in plan.units]
        if choice.embedding_in_backward is not None:
            kept = {"unshard_in_backward": choice.embedding_in_backward}
            units = [
                unit.model_copy(update=kept) if unit.name in self.embeddings else unit
                for unit in units
            ]
        values: dict[str, object] = {"units": tuple(units)}
        if choice.prefetch_moment is not None and plan.fsdp1 is not None:
            update = {"backward_prefetch": choice.prefetch_moment}
            values["fsdp1"] = plan.fsdp1.model_copy(update=update)
        if choice.replicas is not None:
            values |= resized(plan, None, choice.replicas)
        if choice.checkpointing is not None:
            values["checkpointing"] = checkpoint(plan, choice.checkpointing, self.parameters)
        if choice.accumulation_sync is not None:
            sync = {"sync": choice.accumulation_sync}
            values["accumulation"] = plan.accumulation.model_copy(update=sync)
        return plan.with_values(**values)


def make_space(
    work: RecordedWork,
    plan: Plan,
    changed: Collection[int] | None = None,
    *,
    gathers_before_update: bool = False,
) -> Space:
    """Find other ways to make units of the modules of a recorded plan.

    Args:
        work: The recorded work of the run.
        plan: The recorded plan, resolved.
        changed: Units without trained parameters whose parameters changed; None: not observed.
        gathers_before_update: Whether forwards run between the last backward and the update.
    """
    parameters = {name: shape for unit in work.units for name, shape in unit.parameters.items()}
    without_gradient = {
        module
        for unit, own in zip(work.units, work.workload.units, strict=True)
        if own.ends_with_backward
        for module in unit.modules
    }

    def find_risks(candidate: Plan) -> list[str]:
        return candidate.find_risks(parameters, inputs_without_gradient=without_gradient)

    known = set(find_risks(plan))
    holds_host = work.execution is Execution.BLOCKING_HOST
    groupings: dict[str, Plan] = {}
    rules: dict[str, str] = {}
    refused: dict[str, str] = {}
    seen = {frozenset(unit.modules for unit in plan.units)}
    named_by_script = frozenset(
        tuple(unit.modules) for unit in work.units if unit.index in work.by_script
    )
    for name, rule, candidate in _groupings(work, plan, parameters):
        key = frozenset(unit.modules for unit in candidate.units)
        new = [risk for risk in find_risks(candidate) if risk not in known]
        if gathers_before_update:
            refused[name] = "It may change which parameters miss the update."
        elif not named_by_script <= key:
            refused[name] = "The script calls unshard() on a unit that the change removes."
        elif key not in seen and new:
            refused[name] = new[0]
        elif key not in seen:
            groupings[name], rules[name] = candidate, rule
            seen.add(key)
    embeddings = frozenset(
        unit.fqn
        for unit, policy in zip(work.units, work.workload.policies, strict=True)
        if _is_plain_embedding(unit) and policy.reshard_after_forward and policy.unshard_in_backward
    )
    alone = _find_teachers(work, plan)
    unchanged = {
        module
        for unit in alone
        if changed is not None and unit.index not in changed
        for module in unit.modules
    }
    return Space(
        plan=plan,
        groupings=groupings,
        holds_host=holds_host,
        rules=rules,
        refused=refused,
        reshards_root=any(
            unit.is_root and policy.reshard_after_forward
            for unit, policy in zip(work.units, work.workload.policies, strict=True)
        ),
        embeddings=embeddings,
        without_backward=frozenset({ROOT})
        if gathers_before_update
        else frozenset(
            module for unit in alone for module in unit.modules if module not in unchanged
        ),
        unchanged=frozenset(unchanged),
        named_by_script=named_by_script,
        find_risks=find_risks,
        parameters=parameters,
    )


def _find_teachers(work: RecordedWork, plan: Plan) -> list[Unit]:
    """The frozen units that no backward runs, under a root without any other unit."""
    in_backward = {
        unit
        for one in work.workload.passes
        for what, unit in one.tape
        if what is Op.ENTER and not one.is_forward
    }
    lacking = {
        at: unit
        for at, unit in enumerate(work.units)
        if not unit.num_trainable_parameters and at not in in_backward
    }
    root_of = plan.root_of_units
    others = {root_of.get(unit.fqn) for at, unit in enumerate(work.units) if at not in lacking}
    return [unit for unit in lacking.values() if root_of.get(unit.fqn) not in others]


def _is_plain_embedding(unit: Unit) -> bool:
    """Whether a unit is one embedding, whose backward does not read its only parameter.

    A unit of an embedding and a tied head, or a user's `Embedding` with a projection, reads it.
    """
    shapes = [len(shape) for shape in unit.parameters.values()] or [2]
    is_single = len(unit.modules) == 1 and unit.num_tensors <= 1
    return unit.module_class == "Embedding" and is_single and shapes == [2]


def _reshards(inner: Sequence[UnitPlan], choice: Choice) -> dict[str, bool | int]:
    """`reshard_after_forward` of the inner units that a choice changes."""
    reshards: dict[str, bool | int] = {}
    if choice.reshard is not None:
        reshards = {unit.name: choice.reshard for unit in inner}
    kept = inner[max(len(inner) - (choice.num_kept or 0), 0) :]
    return reshards | {unit.name: False for unit in kept}


def _changed(unit: UnitPlan, choice: Choice, reshard: bool | int | None) -> UnitPlan:
    settings = {
        "reshard_after_forward": reshard,
        "reduce_scatter_max_input_buffers": choice.reduce_buffers,
        "unshard_async_op": choice.async_gathers,
        "reshard_after_backward": None
        if choice.keep_between_microbatches is None
        else not choice.keep_between_microbatches,
        "separate_reduce_scatter_group": choice.separate_reduce_group,
        "param_dtype": choice.param_dtype,
        "reduce_dtype": choice.reduce_dtype,
    }
    update = {name: value for name, value in settings.items() if value is not None}
    return unit.model_copy(update=update) if update else unit


# --- other units


def _groupings(
    work: RecordedWork, plan: Plan, parameters: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, str, Plan]]:
    """Yield a description of the change, its rule and the plan."""
    yield from _regrouped(plan)
    yield from _unwrapped(plan, parameters)
    yield from _root_parts(work, plan, parameters)
    if plan.fsdp1 is not None:
        return  # a part would be two modules: a matrix and the norm that feeds it
    sizes = {unit.fqn: unit.num_parameters for unit in work.units}
    typical = median(list(sizes.values())) or 0
    large = [name for name, size in sizes.items() if size > OVERSIZED_RATIO * typical]
    for names, what in ((large, "the largest units"), (list(sizes), "every block")):
        split = split_units(plan, names, parameters)
        cut = [name for name in plan.unit_names if name not in split.unit_names]
        if cut:
            names_of_cut = listed([format_unit(name) for name in cut], 3)
            yield f"split {what} ({names_of_cut})", "R3", split


def _regrouped(plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    blocks = [unit for unit in plan.units if any(re.search(r"\.\d+$", m) for m in unit.modules)]
    num_blocks = sum(len(unit.modules) for unit in blocks)
    for size in GROUP_SIZES:
        if size <= num_blocks and (plan_of := _wrapped(plan, f"every:{size}")) is not None:
            is_merge = len(plan_of.units) < len(plan.units)
            words = "make every block a unit" if size == 1 else f"make units of {size} blocks"
            yield words, "R2" if is_merge else "R3", plan_of
    if len(plan.fsdp_roots) == 1 and len(plan.units) > 1:
        alone = _wrapped(plan, "root")
        if alone is not None:
            yield "make the whole model one unit", "R2", alone


def _wrapped(plan: Plan, policy: str) -> Plan | None:
    try:
        return wrap(plan, policy)
    except PlanError:
        return None


def _unwrapped(
    plan: Plan, parameters: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, str, Plan]]:
    """Make units of the blocks whose parameters the root unit holds (R1)."""
    names = plan.fsdp_roots
    if len(names) != 1:
        return
    root = plan.unit(*names)
    owned = owned_parameters(plan.units, parameters)[root.name]
    blocks = list(dict.fromkeys(m.group(0) for name in owned if (m := BLOCK.match(name))))
    if len(blocks) < 2:
        return
    new = tuple(root.model_copy(update={"modules": (name,)}) for name in blocks)
    new = tuple(unit.model_copy(update={"reshard_after_forward": None}) for unit in new)
    values = {name: getattr(plan, name) for name in type(plan).model_fields}
    units = _among_neighbours(plan.units, new)
    yield "make every block a unit", "R1", Plan.from_dict({**values, "units": units})


def _root_parts(
    work: RecordedWork, plan: Plan, parameters: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, str, Plan]]:
    """Make units of the large modules of the root, such as the embedding and the head (R3).

    A module with a tied parameter stays in the root, because the other module reads it there.
    """
    names = plan.fsdp_roots
    recorded = next((unit for unit in work.units if unit.fqn in names), None)
    if len(names) != 1 or recorded is None or recorded.tied is None:
        return
    root = plan.unit(*names)
    owned = owned_parameters(plan.units, parameters)[root.name]
    numels: dict[str, int] = {}
    for name in owned:
        module = name.rpartition(".")[0]
        numels[module] = numels.get(module, 0) + math.prod(parameters[name])
    tied = {name.rpartition(".")[0] for name in recorded.tied}
    least = LARGE_PART_RATIO * sum(numels.values())
    own = {*root.modules, *tied}
    large, norms = list[tuple[str, ...]](), list[str]()
    for module, numel in numels.items():
        if numel >= least and module not in own:
            large.append((*norms, module))
            norms = []
        elif module not in own and plan.fsdp1 is None:  # a norm joins the module that it feeds
            norms.append(module)
    if not large:
        return
    new = [
        root.model_copy(update={"modules": modules, "reshard_after_forward": None})
        for modules in large
    ]
    is_first = large[0][0] == next(iter(numels))  # the model's order: before the blocks
    others = [unit for unit in plan.units if unit is not root]
    units = [root, *new[:is_first], *others, *new[is_first:]]
    listed = "; ".join(", ".join(map(format_unit, modules)) for modules in large)
    yield f"{ROOT_PARTS} ({listed})", "R3", with_units(plan, units)


def _among_neighbours(units: Sequence[UnitPlan], new: Sequence[UnitPlan]) -> tuple[UnitPlan, ...]:
    """The units with new blocks in the order of forward, in which prefetch and merges count.

    A block follows the block with the number before it. Without such a unit, it precedes the unit
    with the next higher number, or comes last.
    """
    ordered = list(units)
    for unit in new:
        head, number = _numbered(unit.modules[0])
        places = {
            found[1]: at
            for at, each in enumerate(ordered)
            for module in each.modules
            if (found := _numbered(module))[0] == head
        }
        before = max((each for each in places if each < number), default=None)
        after = min((each for each in places if each > number), default=None)
        if before is not None:
            ordered.insert(places[before] + 1, unit)
        else:
            ordered.insert(len(ordered) if after is None else places[after], unit)
    return tuple(ordered)


def _numbered(module: str) -> tuple[str, int]:
    """The list and the number of a block: `layers` and 3 for `layers.3`; -1: no number."""
    head, _, number = module.rpartition(".")
    return (head, int(number)) if number.isdecimal() else (module, -1)
