"""The recorder on models that the real Accelerate prepared, as far as it supports CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus
from tests.conftest import Torchrun

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("accelerate_driver.py")
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Path:
    folder = tmp_path_factory.mktemp("accelerate")
    run_ranks(DRIVER, folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> StoredRun:
    return open_run(folder / "run")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_losses_are_identical_to_the_last_bit(result: dict[str, Any]) -> None:
    assert len(result["without"]) == 2 * STEPS
    assert result["with"] == result["without"]


def test_a_step_is_one_of_the_optimizer_under_accumulation(run: StoredRun) -> None:
    events = run.events(0, kinds=[EventKind.STEP, EventKind.BACKWARD])
    backward = events.where((events.kind == EventKind.BACKWARD) & (events.unit == -1))

    assert run.status is RunStatus.COMPLETE
    assert list(events.step[events.kind == EventKind.STEP]) == list(range(STEPS))
    assert list(backward.microbatch) == [0, 1] * STEPS


def test_units_are_those_that_accelerate_made(run: StoredRun) -> None:
    assert [unit.fqn for unit in run.manifest.units] == ["", "0", "1"]


def test_settings_of_the_accelerator_are_the_configuration(run: StoredRun) -> None:
    assert run.manifest.config == {"mixed_precision": "no", "gradient_accumulation_steps": 2}


def test_clipping_is_recorded_beside_the_units(run: StoredRun) -> None:
    events = run.events(0, steps=[STEPS - 1], kinds=[EventKind.ALL_REDUCE])

    assert set(events.unit) == {-1}


def test_a_model_that_accelerate_did_not_shard_is_refused_with_what_to_do(
    result: dict[str, Any],
) -> None:
    assert "Linear is not sharded" in result["refusal"]
    assert "FSDP in `accelerate config`" in result["refusal"]


def test_a_model_that_accelerate_replicates_is_recorded_without_a_changed_loss(
    result: dict[str, Any], folder: Path
) -> None:
    without, recorded = result["replicated"]
    assert recorded == without
    run = open_run(folder / "ddp")
    assert run.manifest.sharder == "ddp"
    assert (run.status, run.ranks[0].problems) == (RunStatus.COMPLETE, [])
