"""Predict step time and peak memory of plans by simulation, each plan once.

[Note: what is shared] Parameters, messages, compute and memory of a workload depend on the units of
a plan, its dtypes, mesh and accumulation. Reshard, prefetch and buffers only change the schedule.
So plans with the same units, dtypes, mesh and accumulation share one workload.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdp_inspect.advice.gain_parts import SLOWDOWN, split_played_step
from fsdp_inspect.advice.plan_space import Choice, Space, make_space
from fsdp_inspect.advice.slowdown import NOTHING_PAID, Paid, Slowdown, hidden_ns
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.network import Network, NodeLink, Pace
from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.simulation.policies import policies_of
from fsdp_inspect.simulation.recorded import (
    Execution,
    RecordedWork,
    measure_work,
    observed_plan,
    play,
)
from fsdp_inspect.simulation.scenario import (
    Mesh,
    Scenario,
    make_scenario,
    mesh_of,
    resolve_plan,
)
from fsdp_inspect.simulation.schedule import PlayedStep
from fsdp_inspect.simulation.workload import Workload
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunSource

MAX_REPLAY_ERROR = 0.05
"""The largest error of the simulated recorded plan with which plans are ranked."""
AS_RECORDED = Choice()


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


class PlanScorer:
    """Simulates the plans of one run, each once."""

    def __init__(  # noqa: PLR0913 - the network and the work have defaults
        self,
        run: RunSource,
        on_play: Callable[[int], object] = lambda _: None,
        *,
        bus_bytes_per_s: float | None = None,
        latency_ns: float | None = None,
        slowdown: Slowdown | None = None,
        node: NodeLink | None = None,
        work: RecordedWork | None = None,
    ) -> None:
        """Read the recorded work of the run.

        Args:
            run: A recorded or emulated run with timed steps and an observed plan.
            on_play: Called with the number of plans simulated so far, after each plan.
            bus_bytes_per_s: Bandwidth of another network; None: the run's own.
            latency_ns: Latency of another network; None: the run's own.
            slowdown: The slowdown of compute by communication; None: no slowdown.
            node: The link within a node; None: as measured in the run.
            work: The work to simulate, if it is known already; None: the work of the median rank.

        Raises:
            MissingDataError: The run lacks data that the simulation needs.
            ValueError: The network is invalid.
        """
        self._run = run
        self._on_play = on_play
        self.work: RecordedWork = measure_work(run) if work is None else work
        own = self.work.network if node is None else self.work.network.change_node(node)
        self.network: Network = own.change(bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns)
        self._cautious = self.network.at(Pace.CAUTIOUS)
        plan = resolve_plan(observed_plan(run), run.manifest)
        self.mesh: Mesh = mesh_of(plan, run.manifest)
        self.space: Space = make_space(self.work, plan)
        self._scenarios: dict[object, Scenario] = {}
        self.scores: dict[Choice, Score] = {}
        """Every simulated plan, in order."""
        self.refusals: dict[str, None] = {}
        """The reasons why some plans could not be simulated, one sentence each."""
        self.slowdown = slowdown or Slowdown()
        step = self.work.play()
        self._hidden_ns = hidden_ns(step) if self.slowdown.is_told else 0
        self.replay_error = step.duration_ns / self.work.step_time_ns - 1
        """The self-check: simulated / measured step time of the recorded plan, - 1."""
        if abs(self.replay_error) > MAX_REPLAY_ERROR:
            raise MissingDataError(
                f"Plans of run {run.manifest.run_id!r} cannot be ranked: the simulation of the "
                f"recorded plan itself is off by {self.replay_error:+.1%}. Expected at most "
                f"{MAX_REPLAY_ERROR:.0%}. {self._why_off()}"
            )
        self.memory_error = self.work.memory_error
        """Simulated / measured peak memory of the recorded plan, - 1; None: unknown."""
        self.recorded = Score(step.duration_ns, step.peak_bytes, step.duration_ns)
        """The recorded plan on the requested network."""
        if self.network.is_changed:
            self.recorded = self._score(AS_RECORDED)
        self.scores[AS_RECORDED] = self.recorded

    @property
    def tells_no_node_link(self) -> bool:
        """Whether the nodes of all ranks are known, but not the bandwidth within a node."""
        ranks, shard = self.network.node.num_ranks, self.mesh.shard
        if ranks is None or not 1 < ranks < shard or shard % ranks:
            return False
        return self.network.line_of_smaller(ranks, shard)[0] is None

    def score(self, choice: Choice) -> Score:
        """The score of a plan. Each plan is simulated at most once."""
        known = self.scores.get(choice)
        if known is None:
            known = self.scores[choice] = self._score(choice)
            self._on_play(len(self.scores))
        return known

    def can_play(self, choice: Choice) -> bool:
        """Simulate a plan; False if the run lacks the data for it.

        The reason is kept in `refusals`.
        """
        try:
            self.score(choice)
        except (MissingDataError, PlanError) as error:
            self.refusals.setdefault(str(error), None)
            return False
        return True

    def range_ns(self, choice: Choice) -> tuple[int, int]:
        """Step time with the fastest and the slowest messages that the run's own fit allows."""
        if choice == AS_RECORDED:
            return self.recorded.step_ns, self.recorded.step_ns
        steps = []
        for pace in (Pace.FAST, Pace.SLOW):
            score = self._play(choice, self.network.at(pace), pace)
            alone = score.step_ns - score.paid.value_ns
            steps += [alone + score.paid.low_ns, alone + score.paid.high_ns]
        own = self.score(choice).step_ns
        return min(own, *steps), max(own, *steps)

    def parts_ns(self, choice: Choice) -> dict[str, int]:
        """The parts of the simulated step (`advice.gain_parts`); they add up to its time."""
        step = self._simulate(choice, self.network)
        on_host = self.work.execution is not Execution.STREAM
        parts = split_played_step(step, on_host=on_host)
        return parts | {SLOWDOWN: self.score(choice).step_ns - step.duration_ns}

    def scenario(self, choice: Choice) -> Scenario:
        """The work under a plan: its resolved plan, units and assumptions."""
        plan = self.space.plan_of(choice)
        return replace(self._scenario(plan, self.network, Pace.TYPICAL), plan=plan)

    def _why_off(self) -> str:
        """Explain the error of the self-check, and how to fix it."""
        others, alike = self.work.num_other_steps, len(self.work.steps)
        if others:
            return (
                f"{others} of {others + alike} typical steps run other passes or collectives than "
                "the rest, so no step represents all. Record a loop whose steps are alike."
            )
        return (
            "Record more steps on a quiet machine. If the error stays, the simulation does not "
            "support this loop."
        )

    def _score(self, choice: Choice) -> Score:
        score = self._play(choice, self.network)
        if self._cautious == self.network:
            return score
        cautious_ns = self._play(choice, self._cautious, Pace.CAUTIOUS).step_ns
        return replace(score, cautious_ns=cautious_ns)

    def _play(self, choice: Choice, network: Network, pace: Pace = Pace.TYPICAL) -> Score:
        step = self._simulate(choice, network, pace)
        paid = NOTHING_PAID
        if self.slowdown.is_told:
            paid = self.slowdown.paid(hidden_ns(step) - self._hidden_ns)
        step_ns = step.duration_ns + paid.value_ns
        return Score(step_ns, step.peak_bytes, step_ns, paid)

    def _simulate(self, choice: Choice, network: Network, pace: Pace = Pace.TYPICAL) -> PlayedStep:
        plan = self.space.plan_of(choice)
        return play(self.workload(plan, network, pace), self.work.execution)

    def workload(self, plan: Plan, network: Network, pace: Pace = Pace.TYPICAL) -> Workload:
        """The recorded work under a resolved plan. See [Note: what is shared]."""
        scenario = self._scenario(plan, network, pace)
        return replace(
            scenario.workload,
            policies=policies_of(plan, [unit.fqn for unit in scenario.units], self._shard(plan)),
            max_reduce_buffers=max(u.reduce_scatter_max_input_buffers for u in plan.units),
            separate_reduce_group=any(u.separate_reduce_scatter_group for u in plan.units),
        )

    def _shard(self, plan: Plan) -> int:
        return mesh_of(plan, self._run.manifest).shard

    def _scenario(self, plan: Plan, network: Network, pace: Pace) -> Scenario:
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
        cut = (units, tuple(plan.mesh.items()), plan.world_size, around)
        known = self._scenarios.get((pace, cut))
        if known is None:
            known = make_scenario(self.work, self._run.manifest, plan, network)
            self._scenarios[pace, cut] = known
        return known
