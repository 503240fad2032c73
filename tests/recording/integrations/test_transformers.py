"""The callback records the real Trainer and does not change its results."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.run import RunStatus
from tests.cases import wants_slow
from tests.conftest import Torchrun

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("transformers_driver.py")
STEPS = 5


class Trained:
    def __init__(self, folder: Path, process: subprocess.CompletedProcess[str]) -> None:
        self.folder = folder
        self.process = process
        self.run: StoredRun = open_run(folder / "run")


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun
) -> Trained:
    folder = tmp_path_factory.mktemp("trainer")
    fsdp1 = ["fsdp1"] if wants_slow(request) else []
    return Trained(folder, run_ranks(DRIVER, folder, str(STEPS), *fsdp1, check=False))


def test_losses_and_gradients_are_identical_to_the_last_bit(trained: Trained) -> None:
    result = json.loads((trained.folder / "result.json").read_text())

    assert [row["loss"] for row in result["without"] if "loss" in row]
    assert result["with"] == result["without"]


def test_the_run_opens_complete_with_a_step_for_each_of_the_trainer(trained: Trained) -> None:
    events = trained.run.events(0, kinds=[EventKind.STEP])

    assert trained.run.status is RunStatus.COMPLETE
    assert list(events.step) == list(range(STEPS))


def test_units_are_those_that_transformers_made(trained: Trained) -> None:
    names = [unit.fqn for unit in trained.run.manifest.units]

    assert {"model.layers.0", "model.layers.1"} <= set(names)
    assert trained.run.manifest.model.class_name == "LlamaForCausalLM"


def test_a_step_holds_all_its_microbatches(trained: Trained) -> None:
    events = trained.run.events(0, steps=[STEPS - 1], kinds=[EventKind.BACKWARD])

    assert sorted(set(events.microbatch[events.unit == -1])) == [0, 1]


def test_evaluation_lies_between_steps(trained: Trained) -> None:
    events = trained.run.events(0, kinds=[EventKind.BETWEEN_STEPS])

    logged = json.loads((trained.folder / "result.json").read_text())["with"]
    assert len(events) == sum("eval_loss" in row for row in logged) > 1
    assert set(events.phase) == {int(Phase.EVALUATION)}


def test_what_the_trainer_logs_is_recorded_at_its_step(trained: Trained) -> None:
    logged = json.loads((trained.folder / "result.json").read_text())["with"]
    scalars = trained.run.scalars(0)
    names = trained.run.ranks[0].scalar_names
    losses = scalars.where(scalars.name == names.index("loss"))

    assert {"loss", "grad_norm", "learning_rate", "eval_loss"} == set(names)
    assert list(losses.step) == list(range(STEPS))
    assert list(losses.value) == [row["loss"] for row in logged if "loss" in row]


def test_training_arguments_are_the_configuration(trained: Trained) -> None:
    config = trained.run.manifest.config

    assert config["gradient_accumulation_steps"] == 2
    assert config["max_steps"] == STEPS


@pytest.mark.slow
def test_the_option_fsdp_of_the_trainer_is_recorded_with_fsdp1(trained: Trained) -> None:
    result = json.loads((trained.folder / "result.json").read_text())
    run = open_run(trained.folder / "fsdp1")
    names = [unit.fqn for unit in run.manifest.units]

    assert [row["loss"] for row in result["fsdp1_without"] if "loss" in row]
    assert result["fsdp1_with"] == result["fsdp1_without"]
    assert run.manifest.sharder == "fsdp1"
    assert run.status is RunStatus.COMPLETE
    assert [record.problems for record in run.ranks] == [[], []]
    assert names == ["", "model.layers.0", "model.layers.1"]
    assert "loss" in run.ranks[0].scalar_names
    gathers = run.events(0, steps=[1], kinds=[EventKind.ALL_GATHER])
    of_units = gathers.unit[gathers.unit >= 0].tolist()
    assert Counter(of_units) == {0: 2, 1: 4, 2: 4}  # two microbatches
    evaluated = sum("eval_loss" in row for row in result["fsdp1_with"])
    assert len(run.events(0, kinds=[EventKind.BETWEEN_STEPS])) == evaluated > 1


def test_a_failed_training_is_closed_with_its_exception(trained: Trained) -> None:
    failed = open_run(trained.folder / "failed")

    assert trained.process.returncode == 1
    assert failed.status is RunStatus.FAILED
    assert "ValueError at step 3" in (failed.ranks[0].failure or "")
    assert "no more disk for the dog pictures" in (failed.ranks[0].failure or "")
    assert "Exception ignored" not in trained.process.stderr
