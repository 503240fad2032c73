"""Common training loops: their steps are replayed, and all analyses work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.simulation.step_pieces import set_own_collectives_apart
from fsdp_inspect.trace.codes import EventKind
from tests.conftest import Torchrun
from tests.distributed.loop_driver import LOOPS
from tests.distributed.simulated_bytes import expect_bytes_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("loop_driver.py")


@pytest.fixture(scope="module")
def recorded(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    run_ranks(str(DRIVER), str(folder), num_ranks=2)
    return folder


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest, recorded: Path) -> Run:
    return open_run(recorded / request.param)


def test_the_recorded_step_is_replayed(run: Run) -> None:
    simulation, other = run.simulate(rank=0), run.simulate(rank=1)
    assert max(abs(simulation.replay_error), abs(other.replay_error)) < 0.02
    assert simulation.change == 0
    # A peak is predicted if the recorded peak is explained, else the reason is stated.
    assert simulation.memory_error is not None
    is_explained = abs(simulation.memory_error) <= 0.02
    assert (simulation.peak_bytes is not None) == is_explained
    assert is_explained or simulation.memory_refusal
    # Later backwards of a step add to existing gradients, or the loop frees them in between.
    if run.id not in ("accumulating", "truncated", "sharpness"):
        # A busy machine makes gloo free its copy of a reduce-scatter's input later, on either rank.
        assert min(abs(simulation.memory_error), abs(other.memory_error or 0)) < 0.01


IN_VIRTUAL_TIME = (*("adapters", "quantized", "experts", "truncated", "sharpness", "teaching"),)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight emulated ranks, on a clock that only communication and the recorder advance.

    The process is a new one, because modules that are already loaded keep the real clock.
    """
    folder = tmp_path_factory.mktemp("emulated")
    network = ("--world-size=8", "--bandwidth=300MB/s", "--latency=200us", "--no-verdict")
    clock = (sys.executable, "-m", "tests.studies.validation.virtual_time", "fsdp_inspect.emulate")
    command = [*clock, *network, str(DRIVER), str(folder), *IN_VIRTUAL_TIME, "gathered_head"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("loop", IN_VIRTUAL_TIME)
def test_a_simulation_without_a_change_is_the_recorded_step(emulated: Path, loop: str) -> None:
    """The identity law: the time within 0.5%, and every byte."""
    run = open_run(emulated / loop)
    simulation = run.simulate()
    assert simulation.step_time_ns == pytest.approx(simulation.recorded_step_ns, rel=0.005)
    expect_bytes_of(simulation, run.source.manifest.units)


def test_collectives_of_the_script_are_simulated_only_where_none_queue_behind_them(
    emulated: Path, recorded: Path
) -> None:
    with pytest.raises(MissingDataError, match=r"gathers a unit by unshard\(\), as torchtitan"):
        open_run(emulated / "gathered_head").simulate()
    run = open_run(recorded / "gathered_head")
    assert run.simulate().assumptions[0].startswith("The script gathers norm, head itself")
    advice = run.advise()
    assert advice.plan is not None
    assert all(("norm", "head") in {unit.modules for unit in point.plan.units}
               for point in advice.plan.front)  # fmt: skip


def test_each_pass_has_the_collectives_that_ran(run: Run) -> None:
    """The simulated step gathers and reduces each unit as often as the recorded one."""
    work = measure_work(run.source)
    recorded, _ = set_own_collectives_apart(run.source.events(work.rank, steps=work.steps))
    for kind in ("ALL_GATHER", "REDUCE_SCATTER"):
        played = [span.unit for span in work.simulate().spans if span.kind.name == kind]
        ran = recorded.where(recorded.kind == EventKind[kind])
        for at, unit in enumerate(work.units):
            count = int((ran.unit == unit.index).sum()) / len(work.steps)
            assert played.count(at) == count, (kind, unit.fqn)


def test_advice_is_given_and_the_plan_is_followed(run: Run) -> None:
    advice = run.advise()
    assert advice.plan is not None, advice.refusal
    assert check_plan(run.source).is_consistent


@pytest.mark.parametrize(("loop", "between"), [("accumulating", "kept"), ("sharpness", "changed")])
def test_the_recorder_observes_the_gradients_between_backwards(
    recorded: Path, loop: str, between: str
) -> None:
    observed = open_run(recorded / loop).source.manifest.observed
    assert observed["gradients_between_backwards"] == between


@pytest.mark.parametrize("loop", ["truncated", "sharpness"])
def test_backwards_that_do_not_accumulate_are_not_reduced_together(
    recorded: Path, loop: str
) -> None:
    advice = open_run(recorded / loop).advise()
    assert advice.plan is not None
    assert all(point.plan.accumulation.microbatches == 1 for point in advice.plan.front)


def test_no_unit_is_merged_into_a_module_that_a_loop_does_not_run(recorded: Path) -> None:
    """The head of a chunked loss runs alone, so the root cannot contain it."""
    advice = open_run(recorded / "chunked_loss").advise()
    assert advice.plan is not None
    assert any("uses without running the unit's own module" in note for note in advice.plan.notes)
    for point in advice.plan.front:  # the times decide which plans these are
        assert any("head" in unit.modules for unit in point.plan.units)


def test_copies_that_gloo_makes_are_no_inputs_of_the_step(recorded: Path) -> None:
    memory = open_run(recorded / "two_losses").source.memory(0)
    num_tokens, token_bytes = 4 * 32, 8
    assert set(memory.input.tolist()) == {0, num_tokens * token_bytes}
