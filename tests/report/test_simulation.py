"""A simulated step has the same text in a terminal and on its page."""

from dataclasses import replace

import pytest

from fsdp_inspect.report.simulation import render_simulation, why_no_memory
from fsdp_inspect.simulation.recorded import Execution, observed_plan
from fsdp_inspect.simulation.simulate import Simulation, simulate_plan
from tests.builders import MIB
from tests.report.terminal_text import text_of
from tests.simulation.test_recorded import as_run, simple


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """A simulation of a run without a memory step."""
    run = as_run(simple(3), Execution.HOST)
    return simulate_plan(run, observed_plan(run))


def test_an_error_that_rounds_to_nothing_has_no_sign(simulation: Simulation) -> None:
    close = replace(
        simulation,
        replay_error=-0.00001,
        memory_error=0.00001,
        replayed=replace(simulation.replayed, peak_bytes=MIB),
        predicted=replace(simulation.predicted, peak_bytes=MIB),
    )
    shown = text_of(render_simulation(close), width=400)
    assert "measured at 101 ms, an error of 0.0%." in shown
    assert "peak of the recorded plan has an error of 0.0% against its memory step." in shown


def test_parts_with_the_same_text_have_no_difference(simulation: Simulation) -> None:
    before = dict.fromkeys(simulation.replayed.parts_ns, 32_000_001)
    after = {**before, "optimizer": 32_000_000, "forward": 22_000_000}
    close = replace(
        simulation,
        replayed=replace(simulation.replayed, parts_ns=before),
        predicted=replace(simulation.predicted, parts_ns=after),
    )
    lines = text_of(render_simulation(close), width=400).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["optimizer"] == ["optimizer", "32.0", "ms", "32.0", "ms"]
    assert rows["forward"][-2:] == ["-10.0", "ms"]


def test_without_a_memory_step_it_is_said_what_to_record(simulation: Simulation) -> None:
    why = why_no_memory(simulation)
    assert why == (
        "Memory cannot be predicted: the run has no memory step with the passes of its timed steps "
        "(Recorder(..., memory_steps=[3]))."
    )
    assert why in text_of(render_simulation(simulation), width=400)


def test_a_plan_whose_memory_is_refused_says_why(simulation: Simulation) -> None:
    refused = replace(simulation, memory_refusal="Memory cannot be told: it is checkpointed.")
    assert why_no_memory(refused) == refused.memory_refusal
    assert refused.memory_refusal in text_of(render_simulation(refused), width=400)
