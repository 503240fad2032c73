"""Predict step time and peak memory of the plans of a search, each plan once."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from fsdp_inspect.advice.code_change import ran_trainer
from fsdp_inspect.advice.gain_parts import SLOWDOWN, split_simulated_step
from fsdp_inspect.advice.plan_simulator import (
    PlanSimulator,
    PlansToScore,
    Score,
    Slowdown,
    hidden_ns,
    score_plans,
    workload_key,
)
from fsdp_inspect.advice.plan_space import Choice, Space, make_space
from fsdp_inspect.analysis.trust import Trust
from fsdp_inspect.errors import PlanError
from fsdp_inspect.parallel.tasks import InProcess, Tasks
from fsdp_inspect.simulation.network import Network, NodeLink, Pace
from fsdp_inspect.simulation.recorded import (
    Execution,
    RecordedWork,
    measure_work,
    observed_plan,
)
from fsdp_inspect.simulation.scenario import Mesh, Scenario, mesh_of, resolve_plan
from fsdp_inspect.trace.codes import NO_UNIT, EventKind
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunSource

AS_RECORDED = Choice()
_PLANS_PER_TASK = 16


class PlanScorer:
    """Simulates the plans of one run, each once."""

    def __init__(  # noqa: PLR0913 - the network and the work have defaults
        self,
        run: RunSource,
        on_progress: Callable[[int], object] = lambda _: None,
        *,
        bus_bytes_per_s: float | None = None,
        latency_ns: float | None = None,
        slowdown: Slowdown | None = None,
        node: NodeLink | None = None,
        work: RecordedWork | None = None,
        tasks: Tasks | None = None,
    ) -> None:
        """Read the recorded work of the run.

        Args:
            run: A recorded or emulated run with timed steps and an observed plan.
            on_progress: Called with the number of plans simulated so far, after each plan.
            bus_bytes_per_s: Bandwidth of another network; None: the run's own.
            latency_ns: Latency of another network; None: the run's own.
            slowdown: The slowdown of compute by communication; None: no slowdown.
            node: The link within a node; None: as measured in the run.
            work: The work to simulate, if it is known already; None: the work of the median rank.
            tasks: Runs the simulations; default in this process.

        Raises:
            MissingDataError: The run lacks data that the simulation needs.
            ValueError: The network is invalid.
        """
        self._on_progress = on_progress
        self._tasks = tasks or InProcess()
        self.work: RecordedWork = measure_work(run) if work is None else work
        own = self.work.network if node is None else self.work.network.change_node(node)
        self.network: Network = own.change(bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns)
        plan = resolve_plan(observed_plan(run), run.manifest)
        self.mesh: Mesh = mesh_of(plan, run.manifest)
        self.loop_follows_plan: bool = ran_trainer(run.manifest)
        self.space: Space = make_space(
            self.work,
            plan,
            _find_changed_units(run),
            gathers_before_update=_gathers_before_update(run, self.work.rank),
        )
        self.scores: dict[Choice, Score] = {}
        """Every simulated plan, in order."""
        self.refusals: dict[str, None] = {}
        """The reasons why some plans could not be simulated, one sentence each."""
        self.slowdown = slowdown or Slowdown()
        self.simulator: PlanSimulator = PlanSimulator(
            self.work, run.manifest, self.network, self.slowdown
        )
        step = self.simulator.replayed
        self.trust: Trust = self.work.check_itself(step.duration_ns)
        """What may be predicted from the run."""
        self.replay_error: float = self.trust.self_check_error
        self.recorded = Score(step.duration_ns, step.peak_bytes, step.duration_ns)
        """The recorded plan on the requested network."""
        if self.network.is_changed:
            self.recorded = self.simulator.score(self.space.plan_of(AS_RECORDED))
        self.scores[AS_RECORDED] = self.recorded

    @property
    def lacks_node_link(self) -> bool:
        """Whether the nodes of all ranks are known, but not the bandwidth within a node."""
        ranks, shard = self.network.node.num_ranks, self.mesh.shard
        if ranks is None or not 1 < ranks < shard or shard % ranks:
            return False
        return self.network.line_of_smaller(ranks, shard)[0] is None

    def score(self, choice: Choice) -> Score:
        """The score of a plan. Each plan is simulated at most once."""
        known = self.scores.get(choice)
        if known is None:
            known = self.simulator.score(self.space.plan_of(choice))
            self._keep(choice, known)
        return known

    def score_all(self, choices: Sequence[Choice]) -> list[Choice]:
        """Simulate plans as tasks; returns those for which the run has the data.

        The reasons for leaving out the others are kept in `refusals`.
        """
        choices = [choice for choice in dict.fromkeys(choices) if self.space.allows(choice)]
        unknown = [choice for choice in choices if choice not in self.scores]
        refused: dict[Choice, str] = {}
        plans: dict[Choice, Plan] = {}
        for choice in unknown:
            try:
                plans[choice] = self.space.plan_of(choice)
            except PlanError as error:
                refused[choice] = str(error)
        asked = list(self._split(list(plans.values())))
        done = self._tasks.map(score_plans, asked, "plans", lambda done, total: None)
        outcomes = (outcome for each in done for outcome in each)
        for choice in unknown:
            outcome = refused[choice] if choice in refused else next(outcomes)
            if isinstance(outcome, str):
                self.refusals.setdefault(outcome, None)
            else:
                self._keep(choice, outcome)
        return [choice for choice in choices if choice in self.scores]

    def _split(self, plans: Sequence[Plan]) -> Iterator[PlansToScore]:
        """Split plans into tasks, in order: a task has one workload and a few plans."""
        keys = [workload_key(plan) for plan in plans]
        start = 0
        for end in range(1, len(plans) + 1):
            is_full = end - start == _PLANS_PER_TASK
            if end == len(plans) or is_full or keys[end] != keys[start]:
                first = len(self.scores) + start
                yield PlansToScore(self.simulator, tuple(plans[start:end]), first)
                start = end

    def _keep(self, choice: Choice, score: Score) -> None:
        self.scores[choice] = score
        self._on_progress(len(self.scores))

    def range_ns(self, choice: Choice) -> tuple[int, int]:
        """Step time with the fastest and the slowest messages that the run's own fit allows."""
        if choice == AS_RECORDED:
            return self.recorded.step_ns, self.recorded.step_ns
        steps = []
        plan = self.space.plan_of(choice)
        for pace in (Pace.FAST, Pace.SLOW):
            score = self.simulator.score_at(plan, pace)
            alone = score.step_ns - score.paid.value_ns
            steps += [alone + score.paid.low_ns, alone + score.paid.high_ns]
        own = self.score(choice).step_ns
        return min(own, *steps), max(own, *steps)

    def parts_ns(self, choice: Choice) -> dict[str, int]:
        """The parts of the simulated step (`advice.gain_parts`); they add up to its time."""
        step = self.simulator.simulate_step(self.space.plan_of(choice))
        on_host = self.work.execution is not Execution.STREAM
        parts = split_simulated_step(step, on_host=on_host)
        return parts | {SLOWDOWN: self.score(choice).step_ns - step.duration_ns}

    def hides_more(self, before: Choice, after: Choice) -> bool:
        """Whether a plan computes longer during communication than another one does."""
        plans = (self.space.plan_of(choice) for choice in (before, after))
        hidden = [hidden_ns(self.simulator.simulate_step(plan)) for plan in plans]
        return hidden[1] > hidden[0]

    @cached_property
    def most_saved_ns(self) -> int:
        """The step as recorded without its compute, which no plan shortens."""
        return self.recorded.step_ns - self.parts_ns(AS_RECORDED)["compute"]

    def scenario(self, choice: Choice) -> Scenario:
        """The work under a plan: its resolved plan, units and assumptions."""
        return self.simulator.scenario(self.space.plan_of(choice))


def _find_changed_units(run: RunSource) -> set[int] | None:
    """Units without trained parameters that a rank saw change; None: no rank looked."""
    seen = [each.training.units for each in run.ranks if each.training and each.training.units]
    return {unit for each in seen for unit in each.changed} if seen else None


def _gathers_before_update(run: RunSource, rank: int) -> bool:
    """Whether forwards run between the last backward and the update of at least two steps."""
    kinds = (EventKind.BACKWARD, EventKind.FORWARD, EventKind.BETWEEN_STEPS, EventKind.OPTIMIZER)
    rows = run.events(rank, kinds=[int(kind) for kind in kinds])
    rows = rows.where(rows.unit == NO_UNIT)
    is_later = (rows.step[1:] == rows.step[:-1]) & (rows.kind[1:] == EventKind.OPTIMIZER)
    is_forward = np.isin(rows.kind[:-1], (EventKind.FORWARD, EventKind.BETWEEN_STEPS))
    steps = np.unique(rows.step[1:][is_later & is_forward])
    trained = rows.step[rows.kind == EventKind.BACKWARD]
    return int(np.isin(steps, trained).sum()) > 1
