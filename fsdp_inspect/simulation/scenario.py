"""Derive the recorded work under another plan: the same compute in other units.

Measured values stay. Compute moves with the parameters that it uses, and an unchanged unit keeps
its measured communication. Other values are derived:

- messages: parameters padded to the shard group, as torch pads them, in the plan's dtypes;
- their durations: the network's cost lines (`simulation.network`);
- copies: a line over bytes, fitted to the run's units, since each copy has a launch too;
- hooks: a line over the number of tensors, fitted in the same way, since torch's hooks run Python
  code for each tensor;
- compute of a split unit: if the host computes, by the time of its parts in the memory step. Else
  by the fraction of its parameters, since matrix products take time in proportion to their weights.
  Either is an assumption, and the scenario names it;
- compute after hooks, if the host computes: FSDP's hooks leave cold caches, and part of torch's
  hooks of a module runs inside the boundaries of its unit. Both end with the hooks if units merge.
  `HOOK_TRAIL` is an estimate, and the interval reaches from no such effect to twice the estimate.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.formatting import format_bytes, format_unit, listed
from fsdp_inspect.simulation.memory import (
    MemoryWork,
    PieceMemory,
    UnitMemory,
    change_of,
    rise_of,
    time_share_of,
)
from fsdp_inspect.simulation.network import Network, Pace
from fsdp_inspect.simulation.parameters import (
    Parameter,
    compute_dtype,
    default_reduce_dtype,
    flat_numel,
    is_flat,
    is_inside,
    itemsize,
    last_gradient_of,
    parameters_of,
    reduce_input_of,
    sharded_gradient_bytes,
    share_of,
    smaller_group,
)
from fsdp_inspect.simulation.policies import (
    microbatches_of,
    policies_of,
    reshard_of,
)
from fsdp_inspect.simulation.recomputation import recompute
from fsdp_inspect.simulation.recorded import Execution, RecordedWork
from fsdp_inspect.simulation.recorded_units import (
    RecordedUnits,
    Regrouping,
    copy_of_share,
    end_in_order,
)
from fsdp_inspect.simulation.workload import Op, Pass, Piece, Tape, UnitWork, Workload
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.plan import (
    Accumulation,
    Plan,
    UnitPlan,
    check_reshard_sizes,
    find_owner,
    modules_around,
)
from fsdp_inspect.trace.run import ParameterTraits, RunManifest, Unit, traits_that_differ

HOOK_TRAIL = (0.4, 0.2)
"""Compute that disappears with the hooks of a module in forward and of a unit in backward, as a
fraction of the hooks' time. Measured in docs/figures.md."""
_MOST_TRAIL = 0.5
"""The largest fraction of a unit's compute that is attributed to hooks."""
_MOST_UNIT_PASSES = 1 << 14
"""Most passes of units in a step: microbatches by units. Their simulation takes half a minute."""
_LEAST_LEFT = 0.01
"""Of the activations: fewer bytes that a microbatch leaves are not stated."""
_ALIGNED_BYTES = 16
"""The alignment of parameters in a flat parameter with `use_orig_params`."""
_DIVIDED_BY_TIME = (
    "The compute of a split unit is divided by the time of its parts in the memory step."
)
_DIVIDED_BY_PARAMETERS = "The compute of a split unit is divided by the fraction of its parameters."
_SCALED = (
    "The recorded messages of some regrouped parameters are larger or smaller than their sizes and "
    "dtypes explain. They keep this ratio in other units."
)
AFTER_HOOKS = (
    "Hooks of FSDP slow the compute after them by {:.0%} of their own time in forward and {:.0%} "
    "in backward, and other units have other hooks."
).format(*HOOK_TRAIL)
"""The assumption of a scenario whose compute runs after other hooks than in the run."""
_OWN_COMMUNICATORS = (
    "Each unit gathers in backward on its own communicator. Its all-gather does not queue behind "
    "reductions, and neither slows the other."
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of ranks that shard, and the number of replicas."""

    shard: int
    replicate: int = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.shard * self.replicate


@dataclass(frozen=True, slots=True)
class _Cut:
    """A part of a recorded piece."""

    piece: int
    unit: int
    """Unit of the plan, by index."""
    share: float
    """Fraction of the piece's parameters."""
    share_of_largest: float
    """1 for the largest part of its piece."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A plan as work that can be simulated."""

    plan: Plan
    """The resolved plan."""
    units: tuple[Unit, ...]
    """The units with parameters, by index in the workload."""
    workload: Workload
    assumptions: tuple[str, ...]
    """Assumptions instead of measurements, one sentence each."""
    memory_refusal: str | None = None
    """The reason why the workload has no memory; None: it has, or the run has none."""


def mesh_of(plan: Plan, manifest: RunManifest) -> Mesh:
    """The mesh of a plan's units without a separate mesh; missing sizes come from the run.

    Raises:
        PlanError: The mesh does not match the world size.
    """
    sizes = dict(plan.mesh or manifest.mesh)
    replicate = sizes.get("replicate", 1)
    world_size = plan.world_size or (math.prod(sizes.values()) if sizes else manifest.world_size)
    shard = sizes.get("shard", 1 if plan.mesh else world_size // replicate)
    if plan.world_size and plan.mesh and plan.world_size % (shard * replicate):
        raise PlanError(
            f"Invalid mesh {plan.mesh} for a world size of {plan.world_size}. Expected a mesh "
            "whose product divides the world size. Correct one of the two."
        )
    return Mesh(shard=shard, replicate=replicate)


def resolve_plan(plan: Plan, manifest: RunManifest) -> Plan:
    """The plan for the model of a run, with names instead of patterns.

    Raises:
        PlanError: The plan names a module that the model does not have.
    """
    return plan.resolve(_module_names(manifest))


def shapes_of(manifest: RunManifest) -> dict[str, list[int]]:
    """The shape of each recorded parameter, by name."""
    return {name: shape for unit in manifest.units for name, shape in unit.parameters.items()}


def make_scenario(
    work: RecordedWork, manifest: RunManifest, plan: Plan, network: Network
) -> Scenario:
    """Derive the recorded work under one plan; see `ScenarioMaker`."""
    return ScenarioMaker(work, manifest).make(plan, network)


class ScenarioMaker:
    """Derives the recorded work of a run under several plans.

    The lookups that depend on the run only are shared by all plans.
    """

    def __init__(self, work: RecordedWork, manifest: RunManifest) -> None:
        """Read the recorded plan.

        Args:
            work: The recorded work of the run.
            manifest: The run's manifest.
        """
        self._work = work
        self._manifest = manifest
        self._modules = _module_names(manifest)
        self._ran = Plan.from_dict(manifest.plan)
        self._mesh = mesh_of(self._ran, manifest)
        self._recorded = RecordedUnits(work, self._ran, self._mesh.shard)
        self._dtypes = _compute_dtypes(work.units)

    def make(self, plan: Plan, network: Network, pace: Pace = Pace.TYPICAL) -> Scenario:
        """Derive the recorded work under a plan.

        Args:
            plan: The plan, with or without patterns.
            network: The run's own network, or another network.
            pace: The end of the uncertainty of the compute after hooks.

        Raises:
            MissingDataError: The plan needs data that the run does not contain: a link, a
                collective, or the memory under checkpointing.
            PlanError: The plan names unknown modules, or leaves parameters out.
        """
        resolved = plan.resolve(self._modules)
        mesh = mesh_of(resolved, self._manifest)
        check_reshard_sizes(resolved, mesh.shard)
        is_new = network.is_changed or mesh != self._mesh
        changed = replace(network, is_changed=is_new)
        repeated = recompute(self._work, self._ran, resolved)
        scenario = _Regrouping(repeated.work, self._recorded, resolved, mesh, changed, pace).build()
        scenario = replace(
            scenario,
            assumptions=(*repeated.assumptions, *scenario.assumptions),
            memory_refusal=repeated.memory_refusal,
        )
        return self._doubt_dtypes(scenario)

    def _doubt_dtypes(self, scenario: Scenario) -> Scenario:
        """Without memory, and with an assumption on compute, if parameters compute in others."""
        after = _compute_dtypes(scenario.units)
        others = sorted({after[name] for name in after if self._dtypes.get(name) != after[name]})
        if not others:
            return scenario
        dtypes = " and ".join(others)
        refusal = (
            f"Memory is unknown: the run does not show the activations in {dtypes}. "
            f"`fsdp-inspect plan memory --help` shows how to compute it for your model without a "
            f"run (--set param_dtype={others[0]})."
        )
        return replace(
            scenario,
            workload=replace(scenario.workload, memory=None),
            assumptions=(
                *scenario.assumptions,
                f"Compute takes as long in {dtypes} as in the recorded dtype. Only a run shows by "
                "how much it changes, so the step may be far from this.",
            ),
            memory_refusal=scenario.memory_refusal
            or (refusal if scenario.workload.memory is not None else None),
        )


def _compute_dtypes(units: Sequence[Unit]) -> dict[str, str]:
    """The dtype in which each parameter of the units computes."""
    return {name: unit.param_dtype for unit in units for name in parameters_of(unit)}


def _module_names(manifest: RunManifest) -> list[str]:
    """Every module that a plan may name: the model, modules of units, owners of parameters."""
    names = {"": None}
    for unit in manifest.units:
        for parameter in parameters_of(unit):
            parts = parameter.split(".")
            names.update(dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts))))
    observed = (name for unit in manifest.plan.get("units", ()) for name in unit["modules"])
    names.update(dict.fromkeys(observed))
    return list(names)


class _Regrouping:
    """Moves parameters and compute of the recorded units into the units of a plan."""

    def __init__(
        self,
        work: RecordedWork,
        recorded: RecordedUnits,
        plan: Plan,
        mesh: Mesh,
        network: Network,
        pace: Pace,
    ) -> None:
        self._work = work
        self._pace = pace
        self._recorded = recorded
        self._plan = plan
        self._planned = {unit.name: unit for unit in plan.units}
        self._roots = plan.fsdp_roots
        self._mesh = mesh
        self._network = network
        self._assumptions: dict[str, None] = {}
        by_script = [each.fqn for each in work.units if each.index in work.by_script]
        if by_script:
            self._assumptions[
                f"The script gathers {listed([format_unit(each) for each in by_script], 2)} itself "
                "by unshard(). These collectives stay as recorded."
            ] = None
        self._owners = self._assign()
        self._members: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for parameter, shape in recorded.shapes.items():
            self._members[self._owners[parameter]][parameter] = shape
        self._names = [name for name in self._planned if name in self._members]
        self._position = {name: index for index, name in enumerate(self._names)}
        self._unchanged = {
            name: unit
            for name in self._names
            if (unit := recorded.with_parameters(self._members[name])) is not None
        }
        """The recorded unit with exactly the parameters of a unit of the plan, by name."""
        self._shares_of_piece: dict[int, dict[str, float]] = {}
        self._knows_uses: dict[int, bool] = {}

    def build(self) -> Scenario:
        units = [self._unit(index, name) for index, name in enumerate(self._names)]
        cuts = list(self._cuts())
        pieces = self._pieces(cuts)
        base = self._work.workload
        passes = tuple(self._passes(cuts))
        late = self._ending_late(next(each.tape for each in passes if each.is_forward))
        works = [
            replace(self._unit_work(unit), ends_with_backward=unit.index in late) for unit in units
        ]
        workload = replace(
            base,
            units=works,
            policies=policies_of(self._plan, self._names, self._mesh.shard),
            pieces=pieces,
            passes=passes,
            final_order=tuple(range(len(units))),
            max_reduce_buffers=self._most(lambda unit: unit.reduce_scatter_max_input_buffers),
            separate_reduce_group=any(u.separate_reduce_scatter_group for u in self._plan.units),
            fsdp1=self._plan.fsdp1,
            memory=self._memory(cuts, units),
        )
        return Scenario(self._plan, tuple(units), workload, tuple(self._assumptions))

    def _most(self, setting: Callable[[UnitPlan], int]) -> int:
        return max(setting(unit) for unit in self._plan.units)

    # --- passes

    def _passes(self, cuts: Sequence[_Cut]) -> Iterator[Pass]:
        """The recorded passes in units of the plan, with the accumulation of the plan."""
        cuts_of: dict[int, list[int]] = defaultdict(list)
        for at, cut in enumerate(cuts):
            cuts_of[cut.piece].append(at)
        position = self._position
        regroup = Regrouping(
            unit_of_cut=[cut.unit for cut in cuts],
            cuts_of=cuts_of,
            unchanged={
                self._recorded.position(before): position[name]
                for name, before in self._unchanged.items()
            },
            around=self._around(),
            is_part=[len(self._recorded.owners(self._members[name])) == 1 for name in self._names],
            pieces=[piece.unit for piece in self._work.workload.pieces],
            ends_alone=self._plan.fsdp1 is not None,
        )
        into = [
            {position[self._owners[name]] for name in parameters_of(unit)}
            for unit in self._work.units
        ]
        forward: Tape = ()
        for one in self._accumulated():
            reduces = one.reduces
            if reduces is not None:
                reduces = frozenset(new for unit in reduces for new in into[unit])
            tape = regroup.tape(one)
            self._check_executed(one, tape)
            if one.is_forward:
                forward = tape
            elif self._plan.fsdp1 is not None:
                tape = end_in_order(tape, forward, is_delayed=bool(self._plan.forward_prefetch))
            yield replace(one, tape=tape, reduces=reduces)

    def _check_executed(self, one: Pass, tape: Tape) -> None:
        """Check that a pass runs the modules of the units that it would open.

        Raises:
            PlanError: The pass runs only a part of such a module. Example: a loss that calls the
                output layer directly. FSDP's hooks on the module would not run.
        """
        ran = {self._work.units[index].fqn for op, index in one.tape if op is Op.ENTER}
        recorded = {tuple(unit.modules): unit.fqn for unit in self._work.units}
        for name in dict.fromkeys(self._names[index] for op, index in tape if op is Op.ENTER):
            before = recorded.get(tuple(self._planned[name].modules))
            if before is not None and before not in ran and name not in self._unchanged:
                raise PlanError(
                    f"The unit {format_unit(name)} of the plan owns parameters that a "
                    f"{one.phase.label} of this run uses without running the unit's own module, "
                    "so FSDP would not gather them. Expected a unit of their own for them. Keep "
                    "the recorded unit around these parameters."
                )

    def _around(self) -> list[list[int]]:
        """By unit of the plan, the units whose modules contain all its modules."""
        of_module = {
            module: index
            for index, name in enumerate(self._names)
            for module in self._planned[name].modules
        }
        modules = [self._planned[name].modules for name in self._names]
        found = []
        for own in modules:
            first = [of_module[each] for each in modules_around(own[0]) if each in of_module]
            found.append(
                [
                    index
                    for index in sorted(first)
                    if all(any(is_inside(each, one) for one in modules[index]) for each in own[1:])
                ]
            )
        return found

    def _accumulated(self) -> Sequence[Pass]:
        """The recorded passes, unless the plan accumulates differently."""
        recorded, wanted = self._work.workload.passes, self._plan.accumulation
        ran = self._work.accumulation
        if wanted == (ran or Accumulation()):
            return recorded
        if ran is None:
            raise MissingDataError(
                f"The accumulation of this run cannot be changed to {wanted.microbatches} "
                "microbatches: its steps are not a forward and its backward for each microbatch. "
                "Expected such a loop. Leave the accumulation of the plan as it is."
            )
        _check_length(wanted.microbatches, len(self._plan.units))
        microbatches = microbatches_of(wanted)
        if len(microbatches) != ran.microbatches:
            self._assumptions[
                "A microbatch takes as long as a recorded one: the plan has "
                f"{len(microbatches)} a step, the run {ran.microbatches}."
            ] = None
        forwards, backwards = recorded[::2], recorded[1::2]
        before = [round(sum(each.before_ns for each in some) / len(some))
                  for some in (forwards, backwards)]  # fmt: skip
        pairs = [*zip(forwards, backwards, strict=True)]
        if (more := len(microbatches) - len(pairs)) > 0:
            later = pairs[-1] if len(pairs) > 1 else self._second_microbatch(*pairs[0])
            pairs += [later] * more
        return [
            each
            for number, (microbatch, (forward, backward)) in enumerate(
                zip(microbatches, pairs, strict=False)
            )
            for each in (
                replace(forward, microbatch=number, before_ns=before[0]),
                replace(
                    backward,
                    microbatch=number,
                    before_ns=before[1],
                    reduces=None if microbatch.reduces else frozenset(),
                    all_reduces=microbatch.all_reduces,
                    finishes=microbatch.finishes,
                ),
            )
        ]

    def _second_microbatch(self, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
        """The passes of a microbatch after the first: it replaces what that one left."""
        memory = self._work.workload.memory
        if memory is None:
            return forward, backward
        code = backward.before_memory
        left = forward.before_memory.kept + code.kept + sum(each.left for each in memory.pieces)
        if left <= 0:
            return forward, backward
        if left >= _LEAST_LEFT * sum(each.kept for each in memory.pieces):
            self._assumptions[
                f"The {format_bytes(left)} that a microbatch leaves after its backward, such as "
                "logits in a variable, are freed before the next backward."
            ] = None
        rise = max(code.forward_rise - left, 0)
        replaced = replace(code, kept=code.kept - left, forward_rise=rise)
        return forward, replace(backward, before_memory=replaced)

    # --- parameters

    def _assign(self) -> dict[str, str]:
        """The plan's unit of each parameter: the unit of the innermost module around it."""
        unit_of = {module: unit for unit in self._plan.units for module in unit.modules}
        owners = {}
        for unit in self._work.units:
            for parameter in parameters_of(unit):
                owner = find_owner(parameter, unit_of)
                if owner is None:
                    raise PlanError(
                        f"The plan has no unit for the parameter {parameter!r}, so every rank "
                        "would keep a full copy. Expected a unit around every parameter. Add a "
                        'unit for its module, or for the whole model (modules = [""]).'
                    )
                self._check_mesh(unit.fqn, owner)
                owners[parameter] = owner.name
        return owners

    def _check_mesh(self, before: str, after: UnitPlan) -> None:
        """Check that parameters stay on their mesh: experts differ between its ranks.

        Raises:
            PlanError: The plan moves them to a unit with another mesh.
        """
        recorded = self._recorded.planned.get(before)
        own, new = recorded.mesh if recorded else {}, after.mesh
        if own != new:
            raise PlanError(
                f"The plan moves parameters of {format_unit(before)} to {format_unit(after.name)}, "
                f"a unit on another mesh ({new or 'that of the plan'} instead of "
                f"{own or 'that of the plan'}). Expected units within one mesh. Keep them apart."
            )

    def _shard_of(self, name: str) -> int:
        """The number of ranks that shard a unit of the plan."""
        return self._planned[name].num_shards(self._mesh.shard)

    def _unit(self, index: int, name: str) -> Unit:
        """The plan's unit in the form of a manifest."""
        planned, members = self._planned[name], self._members[name]
        before = self._unchanged.get(name)
        source = before or self._work.units[0]
        own = {each: self._recorded.parameters[each] for each in members}
        wanted = planned.param_dtype
        param_dtype = compute_dtype(own.values(), planned)
        reduce_dtype = planned.reduce_dtype or (
            source.reduce_dtype
            if planned.param_dtype is None
            else default_reduce_dtype(own.values(), param_dtype, self._work.torch_release)
        )
        ranks = self._shard_of(name)
        numels = [self._recorded.numels[each] for each in members]
        if before is None and any(each.is_scaled for each in own.values()):
            self._assumptions[_SCALED] = None
        unsharded, sharded, reduced = self._bytes(own, ranks, wanted, param_dtype, reduce_dtype)
        return Unit(
            index=index,
            fqn=name,
            modules=list(planned.modules),
            num_parameters=sum(numels),
            num_trainable_parameters=round(
                sum(n * each.trained for n, each in zip(numels, own.values(), strict=True))
            ),
            num_tensors=before.num_tensors if before else len(members),
            parameters=members,
            traits=_traits(own, wanted),
            unsharded_bytes=unsharded,
            sharded_bytes=sharded,
            reduce_bytes=reduced,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            reshard_after_forward=reshard_of(
                planned, self._shard_of(name), is_root=name in self._roots
            ),
            shard_group=source.shard_group,
            replicate_group=source.replicate_group,
            is_root=name in self._roots,
            recorded_by=source.recorded_by,
        )

    def _bytes(
        self,
        own: dict[str, Parameter],
        ranks: int,
        wanted: str | None,
        param_dtype: str,
        reduce_dtype: str,
    ) -> tuple[int, int, int]:
        """Bytes of a unit's all-gather, of its shard, and of its reduce-scatter, with padding."""
        each, settings = own.values(), self._plan.fsdp1
        if settings is None:
            return (
                round(sum(one.gathered_bytes(ranks, wanted) for one in each)),
                round(sum(one.padded(ranks) * one.stored for one in each) / ranks),
                round(sum(one.reduced_bytes(ranks, reduce_dtype) for one in each)),
            )
        width = itemsize(param_dtype)
        alignment = max(_ALIGNED_BYTES // width, 1) if settings.use_orig_params else 1
        numel = flat_numel([math.prod(one.shape) for one in each], ranks, alignment)
        is_trained = any(one.trained for one in each)
        stored = round(next(iter(each)).stored)
        return numel * width, numel // ranks * stored, numel * itemsize(reduce_dtype) * is_trained

    # --- compute

    def _cuts(self) -> Iterator[_Cut]:
        """The recorded pieces in order, each divided among the plan's units."""
        position = self._position
        shares_of: dict[int, dict[str, float]] = {}
        for one in self._work.workload.passes:
            run = [index for op, index in one.tape if op is Op.RUN]
            run = run if one.is_forward else run[::-1]  # the order of the code
            for index, shares in zip(run, self._shares_of(run), strict=True):
                if shares:
                    shares_of.setdefault(index, shares)
        for index, shares in sorted(shares_of.items()):
            largest = max(shares.values())
            for name, share in shares.items():
                yield _Cut(index, position[name], share, share / largest)

    def _shares_of(self, pieces: Sequence[int]) -> list[dict[str, float]]:
        """The division of each piece among the plan's units, in order.

        A piece that uses no parameters belongs to the next piece, like code between units, or else
        to the previous one.
        """
        shares = [self._shares(piece) for piece in pieces]
        for after, at in pairwise(reversed(range(len(shares)))):
            if not shares[at] and shares[after]:
                shares[at] = {next(iter(shares[after])): 1.0}
        for before, at in pairwise(range(len(shares))):
            if not shares[at]:
                shares[at] = {next(reversed(shares[before])): 1.0}
        return shares

    def _pieces(self, cuts: Sequence[_Cut]) -> list[Piece]:
        recorded = self._work.workload.pieces
        pieces = [
            _scaled(recorded[cut.piece], cut.unit, *self._shares_of_time(cut)) for cut in cuts
        ]
        if self._work.execution is Execution.STREAM or len(self._unchanged) == len(self._names):
            return pieces
        self._assumptions[AFTER_HOOKS] = None
        factors = list(zip(*(self._trails(cuts, pieces, at) for at in range(2)), strict=True))
        return [
            replace(
                piece,
                forward_ns=round(piece.forward_ns * factors[piece.unit][0]),
                backward_ns=round(piece.backward_ns * factors[piece.unit][1]),
            )
            for piece in pieces
        ]

    def _trails(self, cuts: Sequence[_Cut], pieces: Sequence[Piece], direction: int) -> list[float]:
        """By unit of the plan, its compute / its recorded compute: it runs after other hooks.

        Args:
            cuts: The pieces of the plan.
            pieces: Their recorded compute.
            direction: 0: forward, whose hooks run for each module. 1: backward.
        """
        works = self._work.workload.units
        hooks = [each.gather_launch_ns for each in works]
        if direction:
            hooks = [
                each.reduce_launch_ns
                + (forward if (own := each.gather_backward_launch_ns) is None else own)
                for each, forward in zip(works, hooks, strict=True)
            ]
        once = HOOK_TRAIL[direction] * (median(hooks) or 0)

        def trail(modules: Sequence[str]) -> float:
            return once if direction else once * max(len(modules), 1)

        before, removed = defaultdict[int, float](float), defaultdict[int, float](float)
        for each in self._work.workload.pieces:
            before[each.unit] += (each.forward_ns, each.backward_ns)[direction]
        total = defaultdict[int, float](float)
        for cut, piece in zip(cuts, pieces, strict=True):
            old = self._work.workload.pieces[cut.piece].unit
            own = (piece.forward_ns, piece.backward_ns)[direction]
            part = trail(self._work.units[old].modules) / max(before[old], 1)
            total[cut.unit] += own
            removed[cut.unit] += own * min(part, _MOST_TRAIL)
        factors = []
        for index, name in enumerate(self._names):
            more = trail(self._planned[name].modules) - removed[index]
            ends = {Pace.FAST: 2 * (more < 0), Pace.SLOW: 2 * (more > 0), Pace.CAUTIOUS: more > 0}
            end = ends.get(self._pace, 1)
            is_same = name in self._unchanged or not total[index]
            factors.append(1.0 if is_same else max(1 + end * more / total[index], 1 - _MOST_TRAIL))
        return factors

    def _shares_of_time(self, cut: _Cut) -> tuple[float, float]:
        """The fractions of a piece's forward and backward in a cut.

        On a CPU they come from the memory step. A memory step does not contain a device's times.
        """
        memory = self._work.workload.memory
        if cut.share == 1:
            return 1.0, 1.0
        if memory is not None and self._work.execution is not Execution.STREAM:
            own, piece = self._members[self._names[cut.unit]], memory.pieces[cut.piece]
            shares = [
                None if course is None else time_share_of(course, own)
                for course in (piece.forward, piece.backward)
            ]
            if shares[0] is not None and shares[1] is not None:
                self._assumptions[_DIVIDED_BY_TIME] = None
                return shares[0], shares[1]
        self._assumptions[_DIVIDED_BY_PARAMETERS] = None
        return cut.share, cut.share

    # --- memory

    def _memory(self, cuts: Sequence[_Cut], units: Sequence[Unit]) -> MemoryWork | None:
        """Activations move with the compute; the memory of parameters follows from the plan."""
        before = self._work.workload.memory
        if before is None:
            return None
        states = sum(each.resting for each in before.units)
        return MemoryWork(
            pieces=[self._piece_memory(before.pieces[cut.piece], cut, units) for cut in cuts],
            units=[self._unit_memory(unit, states) for unit in units],
            rest=before.rest,
            copies_reduce_input=before.copies_reduce_input,
            frees_before_copy=before.frees_before_copy,
            gathers_in_place=before.gathers_in_place,
        )

    def _piece_memory(self, memory: PieceMemory, cut: _Cut, units: Sequence[Unit]) -> PieceMemory:
        """The memory of a cut; gradients have the dtype of the unit's compute.

        Without recorded uses of parameters, the largest part rises as high as the whole piece.
        """
        old = self._work.units[self._work.workload.pieces[cut.piece].unit]
        width = itemsize(units[cut.unit].param_dtype) / itemsize(old.param_dtype)
        gradients = round(memory.gradients * cut.share * width)
        if cut.share == 1:
            return replace(memory, gradients=gradients)
        own = self._members[self._names[cut.unit]]
        kept, forward_rise, backward_rise = (
            memory.kept * cut.share,
            memory.forward_rise * cut.share_of_largest,
            memory.backward_rise * cut.share_of_largest,
        )
        if memory.forward is not None:
            kept, forward_rise = change_of(memory.forward, own), rise_of(memory.forward, own)
        if memory.backward is not None:
            backward_rise = rise_of(memory.backward, own, unused=gradients)
        return PieceMemory(
            round(kept),
            round(forward_rise),
            round(backward_rise),
            gradients,
            left=round(memory.left * cut.share),
        )

    def _unit_memory(self, unit: Unit, states: int) -> UnitMemory:
        recorded = self._recorded
        gradients = sharded_gradient_bytes(unit, self._shard_of(unit.fqn))
        per_gradient = (states - recorded.sharded_bytes) / max(recorded.gradient_bytes, 1)
        return UnitMemory(
            unsharded=unit.unsharded_bytes,
            reduce_input=reduce_input_of(unit, self._plan.fsdp1),
            flat_gradient=unit.unsharded_bytes
            if is_flat(unit) and unit.fqn not in self._unchanged
            else 0,
            sharded_gradients=gradients,
            resting=unit.sharded_bytes + round(gradients * per_gradient),
            last_gradient=last_gradient_of(unit),
            share=share_of(unit, self._shard_of(unit.fqn)),
        )

    def _shares(self, piece: int) -> dict[str, float]:
        """The division of a piece among the plan's units; empty: it uses no parameters."""
        known = self._shares_of_piece.get(piece)
        if known is None:
            known = self._shares_of_piece[piece] = self._divide(piece)
        return known

    def _divide(self, piece: int) -> dict[str, float]:
        unit = self._work.workload.pieces[piece].unit
        parameters = parameters_of(self._work.units[unit])
        used = self._used(piece) if self._records_uses(unit) else parameters.keys()
        numels: dict[str, int] = defaultdict(int)
        for parameter in parameters:
            if parameter in used:
                numels[self._owners[parameter]] += self._recorded.numels[parameter]
        total = sum(numels.values())
        return {name: numel / total for name, numel in numels.items()}

    def _used(self, piece: int) -> Set[str]:
        """The parameters that the recorded piece used, as recorded by a memory step."""
        memory = self._work.workload.memory
        return memory.pieces[piece].used if memory is not None else frozenset()

    def _records_uses(self, unit: int) -> bool:
        """Whether the run records the uses of parameters of each part of a split unit."""
        if unit not in self._knows_uses:
            parts = {self._owners[name] for name in parameters_of(self._work.units[unit])}
            used = (name for piece in self._recorded.pieces_of[unit] for name in self._used(piece))
            self._knows_uses[unit] = (
                len(parts) > 1 and {self._owners[name] for name in used} == parts
            )
        return self._knows_uses[unit]

    def _ending_late(self, tape: Tape) -> set[int]:
        """The units entered before any compute, if such a unit ended late in the run."""
        first_run = next((at for at, (op, _) in enumerate(tape) if op is Op.RUN), len(tape))
        ends_late = any(unit.ends_with_backward for unit in self._work.workload.units)
        return {unit for op, unit in tape[:first_run] if op is Op.ENTER} if ends_late else set()

    # --- communication

    def _unit_work(self, unit: Unit) -> UnitWork:
        before = self._unchanged.get(unit.fqn)
        recorded = self._recorded_work(before)
        messages = (unit.unsharded_bytes, unit.reduce_bytes)
        has_same_messages = before is not None and messages == (
            before.unsharded_bytes,
            before.reduce_bytes,
        )
        if recorded is not None and has_same_messages and not self._network.is_changed:
            return self._with_smaller_group(unit, recorded, before, is_measured=True)
        own = recorded or self._recorded.rates.hooks(unit.num_tensors)
        if not has_same_messages:
            own = self._recorded.rates.copies(own, unit)
        return self._with_smaller_group(
            unit,
            replace(
                own,
                gather_ns=self._duration(
                    EventKind.ALL_GATHER, unit.unsharded_bytes, self._shard_of(unit.fqn)
                ),
                gather_backward_ns=None,
                reduce_ns=self._duration(
                    EventKind.REDUCE_SCATTER, unit.reduce_bytes, self._shard_of(unit.fqn)
                ),
                all_reduce_ns=self._all_reduce(unit),
                is_trainable=unit.reduce_bytes > 0,
            ),
            before,
            is_measured=False,
        )

    def _recorded_work(self, unit: Unit | None) -> UnitWork | None:
        if unit is None:
            return None
        return self._work.workload.units[self._recorded.position(unit)]

    def _with_smaller_group(
        self, unit: Unit, work: UnitWork, before: Unit | None, *, is_measured: bool
    ) -> UnitWork:
        """Add an integer `reshard_after_forward`: backward gathers over a smaller group.

        Args:
            unit: A unit of the plan.
            work: The work of its gathers over the whole shard group.
            before: The recorded unit with the same parameters; None: there is none.
            is_measured: The work was measured on this unit, and is still valid.
        """
        group = smaller_group(unit.reshard_after_forward)
        is_as_before = before is not None and group == smaller_group(before.reshard_after_forward)
        if is_as_before and is_measured and not (group and self._network.node.is_changed):
            return work
        if group is None:
            return replace(work, gather_backward_ns=None)
        shard = self._shard_of(unit.fqn)
        gather_ns = self._smaller_gather_ns(unit.unsharded_bytes, group, shard)
        if is_as_before:
            # The recorded compute contains the copy of its share; copy-in is a mean of passes.
            return replace(work, gather_backward_ns=gather_ns)
        copied = copy_of_share(work, group, shard)
        return replace(
            work, gather_backward_ns=gather_ns, copy_in_backward_ns=copied, reshard_ns=copied
        )

    def _smaller_gather_ns(self, message_bytes: int, group: int, shard: int) -> int:
        line, assumption = self._network.line_of_smaller(group, shard)
        if line is None:
            raise _unknown_link(group, self._network.node.num_ranks)
        self._assumptions[_OWN_COMMUNICATORS] = None
        if assumption:
            self._assumptions[assumption] = None
        return line.duration_ns(message_bytes, bus_factor(EventKind.ALL_GATHER, group))

    def _all_reduce(self, unit: Unit) -> int:
        own = self._planned[unit.fqn].mesh
        replicas = own.get("replicate", 1) if own else self._mesh.replicate
        if replicas < 2:
            return 0
        message = unit.reduce_bytes // self._shard_of(unit.fqn)
        return self._duration(EventKind.ALL_REDUCE, message, replicas)

    def _duration(self, kind: EventKind, message_bytes: int, ranks: int) -> int:
        duration = self._network.duration_ns(kind, message_bytes, ranks)
        if duration is None:
            raise MissingDataError(
                f"The run has no {kind.label} of FSDP, and the plan needs one to predict its "
                "duration. Expected a run whose mesh has the same dimensions. Record such a run, "
                "or choose a plan within the run's own mesh."
            )
        return duration


def _check_length(microbatches: int, num_units: int) -> None:
    """Reject a step whose simulation takes minutes.

    Raises:
        PlanError: The step has too many microbatches for the number of units.
    """
    most = max(_MOST_UNIT_PASSES // max(num_units, 1), 1)
    if microbatches > most:
        raise PlanError(
            f"A step of {microbatches:,} microbatches with {num_units} units is too long to "
            f"simulate. Expected at most {most:,} microbatches. Reduce the number of microbatches."
        )


def _traits(own: dict[str, Parameter], wanted: str | None) -> dict[str, ParameterTraits]:
    """The settings of a unit's parameters, as in a manifest."""
    if any(0 < one.trained < 1 for one in own.values()):
        return {}  # an older run without them
    return traits_that_differ(
        {
            name: one.traits.model_copy(
                update={
                    "gathered_dtype": one.gathered_dtype(wanted),
                    "is_trained": one.trained > 0,
                }
            )
            for name, one in own.items()
        }
    )


def _unknown_link(group: int, per_node: int | None) -> MissingDataError:
    if per_node is None:
        why = "the ranks that share a node are unknown"
    elif per_node % group:
        why = f"such groups cross the nodes of {per_node} ranks"
    else:
        why = f"its nodes have {per_node} ranks, and no all-gather ran within a node"
    return MissingDataError(
        f"The speed of groups of {group} ranks (reshard_after_forward={group}) is unknown: {why}. "
        "Expected groups within a node with a known link. Set both --node-bandwidth and "
        "--node-latency, or record a run with that setting."
    )


def _scaled(piece: Piece, unit: int, forward: float, backward: float) -> Piece:
    """A part of a piece as compute of another unit."""
    return Piece(
        unit,
        forward_ns=round(piece.forward_ns * forward),
        backward_ns=round(piece.backward_ns * backward),
        recompute_ns=round(piece.recompute_ns * forward),
        forward_launch_ns=round(piece.forward_launch_ns * forward),
        backward_launch_ns=round(piece.backward_launch_ns * backward),
    )
