"""Runs of FSDP1 on gloo ranks: replayed, and their predictions compared with other runs."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.comparison.noise import PROCESS_NOISE_RATIO
from fsdp_inspect.errors import PlanError
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.simulation.simulate import Simulation
from fsdp_inspect.trace.plan import Plan
from tests.conftest import Torchrun
from tests.distributed.fsdp1_driver import SETTINGS
from tests.distributed.simulated_bytes import expect_bytes_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DRIVER = Path(__file__).with_name("fsdp1_driver.py")
PREDICTED: dict[tuple[str, str], dict[str, Any]] = {
    ("full_shard", "shard_grad_op"): {"reshard_after_forward": False},
    ("shard_grad_op", "full_shard"): {"reshard_after_forward": True},
    ("full_shard", "no_prefetch"): {"backward_prefetch": "none"},
    ("full_shard", "one_unit"): {"wrap": "root"},
    ("full_shard", "mixed"): {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    ("every", "no_sync"): {"accumulation_sync": "last"},
    ("no_sync", "every"): {"accumulation_sync": "every"},
}


@pytest.fixture(scope="module")
def folder(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp1")
    run_ranks(str(DRIVER), str(path), num_ranks=2)
    return path


@pytest.fixture(params=SETTINGS)
def run(request: pytest.FixtureRequest, folder: Path) -> Run:
    return open_run(folder / request.param)


def peak_of(simulation: Simulation) -> int:
    """The predicted peak."""
    assert simulation.peak_bytes is not None, simulation.memory_refusal
    return simulation.peak_bytes


def test_a_simulation_without_a_change_is_the_recorded_step(run: Run) -> None:
    simulation = run.simulate()
    assert simulation.step_time_ns == pytest.approx(simulation.recorded_step_ns, rel=0.005)
    expect_bytes_of(simulation, run.manifest.units)
    assert check_plan(run.source).is_consistent
    if run.id == "forward_prefetch":  # the gradients of two units are recorded together
        assert "the simulated peak" in (simulation.memory_refusal or "")
    else:
        assert simulation.peak_bytes == pytest.approx(simulation.recorded_peak_bytes, rel=0.002)


@pytest.mark.parametrize(("before", "after"), PREDICTED)
def test_a_prediction_is_what_a_run_of_the_setting_measures(
    folder: Path, before: str, after: str
) -> None:
    run, other = open_run(folder / before), open_run(folder / after)
    simulation = run.simulate(**PREDICTED[before, after])
    expect_bytes_of(simulation, other.manifest.units)
    # Two runs of one plan differ by up to 10% (`verify`), and a busy machine slows one of them.
    noise_ns = PROCESS_NOISE_RATIO * simulation.recorded_step_ns
    low_ns, high_ns = simulation.low_ns - noise_ns, simulation.high_ns + noise_ns
    assert low_ns <= other.simulate().recorded_step_ns <= high_ns
    # A busy machine makes gloo free its copy of a reduce-scatter's input later, on either rank.
    predicted, measured = (
        [peak_of(one.simulate(rank=rank, **changes)) for rank in (0, 1)]
        for one, changes in ((run, PREDICTED[before, after]), (other, {}))
    )
    assert min(predicted) == pytest.approx(min(measured), rel=0.01)


def test_advice_prints_code_of_fsdp1_that_can_be_pasted(folder: Path) -> None:
    advice = open_run(folder / "full_shard").advise()
    assert advice.plan is not None, advice.refusal
    assert advice.changes
    for suggestion in advice.changes:
        for code in (suggestion.snippet, suggestion.change.text):
            assert "FullyShardedDataParallel(" in code
            assert "fully_shard(" not in code
            ast.parse(code)
    assert "--plan" not in advice.plan.change.launch


def test_advise_writes_the_plan_of_fsdp1_and_that_for_fsdp2(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    command = [sys.executable, "-m", "fsdp_inspect", "advise", str(folder / "full_shard")]
    subprocess.run([*command, "--write", str(path)], check=True, capture_output=True, timeout=120)
    assert Plan.load(path).fsdp1 is not None
    assert Plan.load(tmp_path / "plan.fsdp2.toml").fsdp1 is None
    assert (tmp_path / "plan.prediction.json").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wrap": "every:2"}, "FSDP1 wraps one module for each unit"),
        ({"forward_prefetch": 2}, "FSDP1 prefetches at most the next unit"),
        ({"backward_prefetch": 1}, "FSDP1 prefetches the previous unit or none"),
        ({"reshard_after_forward": 2}, "FSDP1 cannot reshard to a part of the ranks"),
        ({"reduce_scatter_buffers": 2}, "FSDP1 has no such setting"),
    ],
    ids=str,
)
def test_a_setting_that_fsdp1_does_not_have_is_refused(
    folder: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        open_run(folder / "full_shard").simulate(**change)
