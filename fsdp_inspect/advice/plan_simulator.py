"""Simulate the recorded work of a run under plans; tasks send the simulator to other processes.

[Note: what is shared] Parameters, messages, compute and memory of a workload depend on the units of
a plan, its dtypes, mesh and accumulation. Reshard, prefetch and buffers only change the schedule.
So plans with the same units, dtypes, mesh and accumulation share one workload.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from fsdp_inspect.advice.slowdown import NOTHING_PAID, Paid, Slowdown, hidden_ns
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.network import Network, Pace
from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.simulation.policies import policies_of
from fsdp_inspect.simulation.recorded import RecordedWork, play
from fsdp_inspect.simulation.scenario import Scenario, make_scenario, mesh_of
from fsdp_inspect.simulation.schedule import PlayedStep
from fsdp_inspect.simulation.workload import Workload
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest


@dataclass(frozen=True, slots=True)
class Score:
    """The simulated step time and peak memory of a plan."""

    step_ns: int
    """Includes the cost of hiding more communication than the recorded plan does."""
    peak_bytes: int | None
    """None: the run has no memory step that records categories."""
    cautious_ns: int
    """`step_ns` with the highest durations that an unknown latency allows; plans are ranked by it.
    Equal to `step_ns` if the latency is known."""
    paid: Paid = NOTHING_PAID
    """Part of `step_ns`; see [Note: what hiding costs] in `advice.slowdown`."""

    def saves_over(self, other: "Score") -> int:
        """The time that this plan saves both at the typical and at the cautious end, ns."""
        return min(other.step_ns - self.step_ns, other.cautious_ns - self.cautious_ns)


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
        self._network = network
        self._cautious = network.at(Pace.CAUTIOUS)
        self._slowdown = slowdown
        self.replayed: PlayedStep = work.play()
        """The recorded plan on the recorded network."""
        self._hidden_ns = hidden_ns(self.replayed) if slowdown.is_told else 0
        self._scenarios: dict[object, Scenario] = {}
        self.key = uuid4().hex
        """Identifies the copies of this simulator in other processes."""
        self.is_copy = False

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process, without the scenarios, which are large."""
        return {**vars(self), "_scenarios": {}, "is_copy": True}

    def score(self, plan: Plan) -> Score:
        """Simulate a resolved plan.

        Raises:
            MissingDataError: The run lacks data that this plan needs.
            PlanError: The plan does not fit the model.
        """
        score = self.score_at(plan, Pace.TYPICAL)
        if self._cautious == self._network:
            return score
        cautious_ns = self._score(plan, self._cautious, Pace.CAUTIOUS).step_ns
        return replace(score, cautious_ns=cautious_ns)

    def score_at(self, plan: Plan, pace: Pace) -> Score:
        """Simulate a plan with one of the latencies that the run's own fit allows."""
        network = self._network if pace is Pace.TYPICAL else self._network.at(pace)
        return self._score(plan, network, pace)

    def _score(self, plan: Plan, network: Network, pace: Pace) -> Score:
        step = self._play(plan, network, pace)
        paid = NOTHING_PAID
        if self._slowdown.is_told:
            paid = self._slowdown.paid(hidden_ns(step) - self._hidden_ns)
        step_ns = step.duration_ns + paid.value_ns
        return Score(step_ns, step.peak_bytes, step_ns, paid)

    def play_step(self, plan: Plan) -> PlayedStep:
        """The simulated step of a resolved plan."""
        return self._play(plan, self._network, Pace.TYPICAL)

    def _play(self, plan: Plan, network: Network, pace: Pace) -> PlayedStep:
        return play(self.workload(plan, network, pace), self._work.execution)

    def workload(self, plan: Plan, network: Network, pace: Pace = Pace.TYPICAL) -> Workload:
        """The recorded work under a resolved plan. See [Note: what is shared]."""
        scenario = self._scenario(plan, network, pace)
        shard = mesh_of(plan, self._manifest).shard
        return replace(
            scenario.workload,
            policies=policies_of(plan, [unit.fqn for unit in scenario.units], shard),
            max_reduce_buffers=max(u.reduce_scatter_max_input_buffers for u in plan.units),
            separate_reduce_group=any(u.separate_reduce_scatter_group for u in plan.units),
        )

    def scenario(self, plan: Plan) -> Scenario:
        """The work under a resolved plan: its units and assumptions."""
        return replace(self._scenario(plan, self._network, Pace.TYPICAL), plan=plan)

    def _scenario(self, plan: Plan, network: Network, pace: Pace) -> Scenario:
        key = (pace, workload_key(plan))
        known = self._scenarios.get(key)
        if known is None:
            known = make_scenario(self._work, self._manifest, plan, network)
            self._scenarios[key] = known
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
    around = (str(plan.accumulation), str(plan.checkpointing))
    return units, tuple(plan.mesh.items()), plan.world_size, around


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


def score_plans(asked: PlansToScore) -> list[Score | str]:
    """Simulate some plans; a text is the reason why a plan cannot be simulated."""
    simulator = asked.simulator
    if simulator.is_copy and simulator.key in _kept:
        simulator = _kept[simulator.key]
    elif simulator.is_copy:
        _kept.clear()
        _kept[simulator.key] = simulator
    found: list[Score | str] = []
    for plan in asked.plans:
        try:
            found.append(simulator.score(plan))
        except (MissingDataError, PlanError) as error:
            found.append(str(error))
    return found
