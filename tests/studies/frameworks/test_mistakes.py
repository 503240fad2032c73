"""Mistakes that are planted through the options of a framework are named, in unmodified scripts."""

from pathlib import Path

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.analysis.correctness import TrainingCheck
from tests.conftest import Torchrun

DRIVER = Path(__file__).with_name("mistakes_driver.py")
CHECKS = {
    "none": None,
    "sharded": None,
    "stale": TrainingCheck.OPTIMIZER,
    "same": TrainingCheck.BATCHES,
    "means": TrainingCheck.LOSS,
    "alone": TrainingCheck.GRADIENTS,
}
CASES = [
    *(f"transformers-{name}" for name in ("none", "stale", "same", "means")),
    *(f"accelerate-{name}" for name in CHECKS),
    *(f"lightning-{name}" for name in CHECKS if name != "sharded"),
]

DEEPSPEED = DRIVER.with_name("deepspeed_mistakes.py")
TORCHTITAN = DRIVER.with_name("torchtitan_driver.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_made_with_a_framework_is_named(
    case: str, tmp_path: Path, torchrun: Torchrun
) -> None:
    framework, _, mistake = case.partition("-")
    pytest.importorskip(framework)

    arguments = ("-m", "fsdp_inspect.record", "--no-verdict", "--out", tmp_path, DRIVER, case)
    torchrun(*arguments, environment={"PYTHONPATH": str(DRIVER.parents[3])})

    [folder] = tmp_path.iterdir()
    faults = open_run(folder).correctness().faults
    expected = CHECKS[mistake]
    assert [fault.check for fault in faults] == ([] if expected is None else [expected])


@pytest.mark.parametrize("mistake", ["none", "same", "means"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_mistake_with_a_stage_of_deepspeed_is_named(
    stage: int, mistake: str, tmp_path: Path, torchrun: Torchrun
) -> None:
    """An optimizer of other tensors ends in an error of DeepSpeed."""
    pytest.importorskip("deepspeed")

    arguments = ("-m", "fsdp_inspect.record", "--no-verdict", "--out", tmp_path)
    environment = {"PYTHONPATH": str(DRIVER.parents[3])}
    torchrun(*arguments, DEEPSPEED, f"{stage}-{mistake}", environment=environment)

    [folder] = tmp_path.iterdir()
    correctness = open_run(folder).correctness()
    expected = CHECKS[mistake]
    assert [fault.check for fault in correctness.faults] == ([expected] if expected else [])
    assert "in its own optimizer" in correctness.not_checked["optimizer"]


@pytest.mark.parametrize("mistake", ["none", "stale", "same", "means", "alone"])
def test_a_mistake_in_a_part_of_torchtitan_is_named(
    mistake: str, tmp_path: Path, torchrun: Torchrun
) -> None:
    """The loader, the loss, the optimizers and the sharding are replaced by its configuration."""
    pytest.importorskip("torchtitan")

    environment = {"PYTHONPATH": str(DRIVER.parents[3])}
    torchrun(TORCHTITAN, tmp_path, "--callback", mistake, environment=environment)

    faults = open_run(tmp_path / "run").correctness().faults
    expected = CHECKS[mistake]
    assert [fault.check for fault in faults] == ([] if expected is None else [expected])
