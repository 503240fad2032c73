"""Simulate the recorded work of a run under plans; tasks send the simulator to other processes.

[Note: what is shared] Parameters, messages, compute and memory of a workload depend on the units of
a plan, its dtypes, mesh and accumulation. Reshard, prefetch and buffers only change the schedule.
So plans with the same units, dtypes, mesh and accumulation share one workload. Some of them also
have the same schedule, for example a prefetch depth of 0 and torch's own order. They share a score.
"""

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from uuid import uuid4

from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.network import Network, Pace
from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.simulation.policies import policies_of
from fsdp_inspect.simulation.recorded import RecordedWork, simulate_step
from fsdp_inspect.simulation.scenario import AFTER_HOOKS, Scenario, ScenarioMaker, mesh_of
from fsdp_inspect.simulation.schedule import SimulatedStep
from fsdp_inspect.simulation.workload import UnitPolicy, Workload
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest

# --- Estimate how much communication slows the compute that hides it.
#
# [Note: what hiding costs] Communication kernels take bandwidth and cores from compute kernels.
# Each hidden ns costs (slowdown - 1) ns of compute (rule R24). The recorded compute already
# includes this cost for the recorded plan. So a simulated plan is charged for hiding more than the
# recorded plan, and credited for hiding less. Only a clear slowdown counts (`analysis.contention`).
# Without one nothing is charged, and the advice states this assumption.


_EMULATED = "emulated links take no resources from compute"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The factor by which compute slows next to communication, with the spread of passes."""

    middle: float = 1.0
    low: float = 1.0
    high: float = 1.0
    reason: str = ""
    """The reason why no slowdown is assumed; empty: the slowdown was measured."""

    @classmethod
    def of(cls, contention: Contention | None, *, is_emulated: bool) -> "Slowdown":
        """The measured slowdown, or none with the reason."""
        if is_emulated:
            return cls(reason=_EMULATED)
        if contention is None or contention.slowdown is None:
            why = contention.reason if contention is not None else None
            return cls(reason=_clause(why or "No timed step exists."))
        if not contention.is_clear or contention.slowdown <= 1:
            return cls(reason="the times of single passes vary by more than the measured slowdown")
        low, high = contention.low or 1.0, contention.high or 1.0
        return cls(contention.slowdown, max(low, 1.0), max(high, contention.slowdown))

    @property
    def is_measured(self) -> bool:
        """Whether a slowdown was measured, so that hiding is charged."""
        return self.middle > 1

    @property
    def is_assumed(self) -> bool:
        """Whether a slowdown may exist that the run does not show."""
        return not self.is_measured and self.reason != _EMULATED

    def paid(self, hidden_more_ns: int) -> "Paid":
        """The cost of hiding more than the recorded plan; negative: the gain of hiding less."""
        return Paid(*(round((each - 1) * hidden_more_ns) for each in self._all))

    @property
    def _all(self) -> tuple[float, float, float]:
        return self.middle, self.low, self.high


@dataclass(frozen=True, slots=True)
class Paid:
    """Additional compute of a step, ns; see [Note: what hiding costs]."""

    value_ns: int = 0
    low_ns: int = 0
    """The cost at the lowest slowdown of single passes."""
    high_ns: int = 0


NOTHING_PAID = Paid()


def hidden_ns(step: SimulatedStep) -> int:
    """The time of a simulated step during which communication and compute both run."""
    return step.ran({EventKind.COMPUTE}).intersect(step.ran(COLLECTIVES)).duration_ns


def _clause(sentence: str) -> str:
    """A sentence as the last clause of another sentence."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")


@dataclass(frozen=True, slots=True)
class Score:
    """The simulated step time and peak memory of a plan."""

    step_ns: int
    """Includes the cost of hiding more communication than the recorded plan does."""
    peak_bytes: int | None
    """None: the run has no memory step that records categories."""
    cautious_ns: int
    """`step_ns` with the highest durations that an unknown latency allows, and without a gain of
    compute from fewer hooks; plans are ranked by it. Equal to `step_ns` without either."""
    paid: Paid = NOTHING_PAID
    """Part of `step_ns`; see [Note: what hiding costs]."""

    def saves_over(self, other: "Score") -> int:
        """The time that this plan saves both at the typical and at the cautious end, ns."""
        return min(other.step_ns - self.step_ns, other.cautious_ns - self.cautious_ns)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A workload, and the settings of a plan that change its schedule only."""

    workload_key: Hashable
    policies: tuple[UnitPolicy, ...]
    max_reduce_buffers: int
    separate_reduce_group: bool

    def of(self, workload: Workload) -> Workload:
        """The workload with this schedule."""
        return replace(
            workload,
            policies=list(self.policies),
            max_reduce_buffers=self.max_reduce_buffers,
            separate_reduce_group=self.separate_reduce_group,
        )


class PlanSimulator:
    """Simulates plans of one run. It can be pickled."""

    def __init__(
        self, work: RecordedWork, manifest: RunManifest, network: Network, slowdown: Slowdown
    ) -> None:
        """Simulate the recorded plan, to which the others are compared.

        Args:
            work: The recorded work of the run.
            manifest: The manifest of the run.
            network: The network of all plans.
            slowdown: The slowdown of compute by communication.
        """
        self._work = work
        self._manifest = manifest
        self._networks = {Pace.TYPICAL: network} | {
            pace: network.at(pace) for pace in Pace if pace is not Pace.TYPICAL
        }
        self._is_certain = self._networks[Pace.CAUTIOUS] == network
        self._slowdown = slowdown
        self.replayed: SimulatedStep = work.simulate()
        """The recorded plan on the recorded network."""
        self._hidden_ns = hidden_ns(self.replayed) if slowdown.is_measured else 0
        self._scenarios: dict[object, Scenario] = {}
        self._scores: dict[object, Score] = {}
        """The scores of each schedule that was simulated."""
        self._key = uuid4().hex
        """Identifies the copies of this simulator in other processes."""

    @cached_property
    def _maker(self) -> ScenarioMaker:
        return ScenarioMaker(self._work, self._manifest)

    def __reduce__(self) -> tuple[Callable[..., "PlanSimulator"], tuple[str, bytes]]:
        """A process that has a copy already does not read the state again."""
        return _copy_of, (self._key, self._state)

    @cached_property
    def _state(self) -> bytes:
        """The state for another process, without the scenarios, which are large."""
        state = {**vars(self), "_scenarios": {}, "_scores": {}}
        state.pop("_maker", None)
        return pickle.dumps(state)

    def score(self, plan: Plan) -> Score:
        """Simulate a resolved plan.

        Raises:
            MissingDataError: The run lacks data that this plan needs.
            PlanError: The plan does not fit the model.
        """
        schedule = self._schedule(plan)
        score = self._score(plan, schedule, Pace.TYPICAL)
        scenario = self._scenario(plan, schedule.workload_key, Pace.TYPICAL)
        if self._is_certain and AFTER_HOOKS not in scenario.assumptions:
            return score
        cautious_ns = self._score(plan, schedule, Pace.CAUTIOUS).step_ns
        return replace(score, cautious_ns=cautious_ns)

    def score_at(self, plan: Plan, pace: Pace) -> Score:
        """Simulate a plan with one of the latencies that the run's own fit allows.

        Only the typical pace has a peak: memory does not depend on the pace.
        """
        return self._score(plan, self._schedule(plan), pace)

    def _score(self, plan: Plan, schedule: _Schedule, pace: Pace) -> Score:
        key = (pace, schedule)
        known = self._scores.get(key)
        if known is None:
            known = self._scores[key] = self._simulate(plan, schedule, pace)
        return known

    def _simulate(self, plan: Plan, schedule: _Schedule, pace: Pace) -> Score:
        workload = schedule.of(self._scenario(plan, schedule.workload_key, pace).workload)
        if pace is not Pace.TYPICAL:
            workload = replace(workload, memory=None)
        told = self._slowdown.is_measured
        step = simulate_step(workload, self._work.execution, with_spans=told)
        paid = self._slowdown.paid(hidden_ns(step) - self._hidden_ns) if told else NOTHING_PAID
        step_ns = step.duration_ns + paid.value_ns
        return Score(step_ns, step.peak_bytes, step_ns, paid)

    def simulate_step(self, plan: Plan) -> SimulatedStep:
        """The simulated step of a resolved plan."""
        return simulate_step(self.workload(plan), self._work.execution)

    def workload(self, plan: Plan) -> Workload:
        """The recorded work under a resolved plan. See [Note: what is shared]."""
        return self._schedule(plan).of(self.scenario(plan).workload)

    def scenario(self, plan: Plan) -> Scenario:
        """The work under a resolved plan: its units and assumptions."""
        return replace(self._scenario(plan, workload_key(plan), Pace.TYPICAL), plan=plan)

    def _schedule(self, plan: Plan) -> _Schedule:
        key = workload_key(plan)
        names = [unit.fqn for unit in self._scenario(plan, key, Pace.TYPICAL).units]
        return _Schedule(
            workload_key=key,
            policies=tuple(policies_of(plan, names, mesh_of(plan, self._manifest).shard)),
            max_reduce_buffers=max(u.reduce_scatter_max_input_buffers for u in plan.units),
            separate_reduce_group=any(u.separate_reduce_scatter_group for u in plan.units),
        )

    def _scenario(self, plan: Plan, key: Hashable, pace: Pace) -> Scenario:
        known = self._scenarios.get((pace, key))
        if known is None:
            known = self._maker.make(plan, self._networks[pace], pace)
            self._scenarios[pace, key] = known
        return known


def workload_key(plan: Plan) -> Hashable:
    """Plans with the same key share one workload. See [Note: what is shared]."""
    units = tuple(
        (
            unit.modules,
            tuple(unit.mesh.items()),
            unit.param_dtype,
            unit.reduce_dtype,
            smaller_group(unit.reshard_after_forward),
        )
        for unit in plan.units
    )
    around = [str(plan.accumulation), str(plan.checkpointing), str(plan.fsdp1)]
    if plan.fsdp1 is not None:
        around.append(str(plan.forward_prefetch))  # it moves the ends of backwards
    return units, tuple(plan.mesh.items()), plan.world_size, tuple(around)


@dataclass(frozen=True, slots=True)
class PlansToScore:
    """One task of a search: a few plans, which mostly share one workload."""

    simulator: PlanSimulator
    plans: tuple[Plan, ...]
    first: int
    """The number of the first plan in the search, from 1."""

    def __str__(self) -> str:
        last = self.first + len(self.plans) - 1
        return f"plan {self.first}" if last == self.first else f"plans {self.first}-{last}"


_kept: dict[str, PlanSimulator] = {}
"""In a worker: the last simulator with its scenarios, for the next task of the same search."""


def _copy_of(key: str, state: bytes) -> PlanSimulator:
    known = _kept.get(key)
    if known is None:
        known = PlanSimulator.__new__(PlanSimulator)
        vars(known).update(pickle.loads(state))
        _kept.clear()
        _kept[key] = known
    return known


def score_plans(asked: PlansToScore) -> list[Score | str]:
    """Simulate some plans; a text is the reason why a plan cannot be simulated."""
    found: list[Score | str] = []
    for plan in asked.plans:
        try:
            found.append(asked.simulator.score(plan))
        except (MissingDataError, PlanError) as error:
            found.append(str(error))
    return found
