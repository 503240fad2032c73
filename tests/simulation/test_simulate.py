"""The causes and the interval that a simulation states next to its step time."""

from dataclasses import replace

from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import Execution, observed_plan
from fsdp_inspect.simulation.simulate import Simulation, simulate_plan
from fsdp_inspect.simulation.workload import Microbatch, passes_of, tape_of
from tests.simulation.test_recorded import as_run, simple


def simulated(execution: Execution, **changes: int) -> Simulation:
    run = as_run(simple(4, gather_ns=8_000_000), execution)
    return simulate_plan(run, apply_changes(observed_plan(run), Changes(**changes)))


def test_the_causes_of_a_prediction_make_up_its_exposed_time():
    played = simulated(Execution.HOST).predicted
    assert sum(played.causes_ns.values()) == played.exposed_ns > 0
    for unit in played.units:
        assert sum(unit.causes_ns.values()) == unit.exposed_ns


def test_prefetch_takes_the_late_issue_away():
    late = simulated(Execution.HOST).predicted.causes_ns["late_issue"]
    ahead = simulated(Execution.HOST, forward_prefetch=1).predicted.causes_ns
    assert late == (3 + 1) * 8_000_000  # forward except the first (the floor), and backward's first
    assert ahead["late_issue"] == 8_000_000


def test_a_backend_that_holds_the_host_blocks():
    causes = simulated(Execution.BLOCKING_HOST).predicted.causes_ns
    assert set(causes) == {"blocking", "floor"}


def test_the_plan_of_a_run_tells_its_accumulation():
    workload = replace(
        simple(3),
        passes=passes_of(
            tape_of(simple(3).pieces),
            [Microbatch(reduces=False), Microbatch(reduces=False), Microbatch()],
        ),
    )
    plan = observed_plan(as_run(workload, Execution.HOST))
    assert (plan.accumulation.microbatches, plan.accumulation.sync) == (3, "last")


def test_the_interval_holds_the_prediction():
    simulation = simulated(Execution.HOST, forward_prefetch=1)
    assert simulation.low_ns <= simulation.predicted.step_time_ns <= simulation.high_ns
