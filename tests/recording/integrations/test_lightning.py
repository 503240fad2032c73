"""The callback records the real Lightning, under both of its package names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import EventTable
from tests.cases import mark_slow, wants_slow
from tests.conftest import Torchrun

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("lightning_driver.py")
PACKAGES = ("pytorch_lightning", "lightning.pytorch")
STEPS = 5


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun
) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    run_ranks(DRIVER, folder, *(PACKAGES if wants_slow(request) else PACKAGES[1:]))
    return folder


@pytest.fixture(scope="module", params=mark_slow(PACKAGES, but=PACKAGES[1:]))
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(folder: Path, package: str) -> StoredRun:
    return open_run(folder / package / "run")


@pytest.fixture(scope="module")
def losses(folder: Path, package: str) -> dict[str, list[float]]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result[package]


def whole(events: EventTable) -> EventTable:
    """The events without those of a single unit."""
    return events.where(events.unit == -1)


def test_losses_are_identical_to_the_last_bit(losses: dict[str, list[float]]) -> None:
    assert len(losses["without"]) == 2 * STEPS
    assert losses["with"] == losses["without"]


def test_a_step_holds_all_accumulated_batches(run: StoredRun) -> None:
    backward = whole(run.events(0, kinds=[EventKind.BACKWARD]))

    assert run.status is RunStatus.COMPLETE
    assert list(run.events(0, kinds=[EventKind.STEP]).step) == list(range(STEPS))
    assert list(backward.step) == [step for step in range(STEPS) for _ in range(2)]


def test_the_optimizer_is_what_follows_the_last_backward_of_a_step(run: StoredRun) -> None:
    """Lightning computes the last batch of a step in a closure inside of `optimizer.step`."""
    optimizer = run.events(0, kinds=[EventKind.OPTIMIZER])
    backward = whole(run.events(0, kinds=[EventKind.BACKWARD]))

    assert list(optimizer.step) == list(range(STEPS))
    assert (optimizer.start_ns >= backward.end_ns[1::2]).all()


def test_units_are_named_as_in_the_module(run: StoredRun) -> None:
    assert [unit.fqn for unit in run.manifest.units] == ["model.0", "model.1", "model.2"]
    assert run.manifest.model.class_name == "Net"


def test_validation_lies_between_steps(run: StoredRun) -> None:
    assert len(run.events(0, kinds=[EventKind.BETWEEN_STEPS])) == 2


def test_the_loss_of_a_step_is_the_mean_over_its_batches(
    run: StoredRun, losses: dict[str, list[float]]
) -> None:
    """The value that Lightning passes to callbacks is divided by `accumulate_grad_batches`."""
    scalars = run.scalars(0)
    means = [(a + b) / 2 for a, b in zip(losses["with"][::2], losses["with"][1::2], strict=True)]

    assert run.ranks[0].scalar_names == ["loss"]
    assert list(scalars.step) == list(range(STEPS))
    assert list(scalars.value) == pytest.approx(means, rel=1e-6)


def test_hyperparameters_are_the_configuration(run: StoredRun) -> None:
    assert run.manifest.config == {"width": 16}


def test_a_failed_fit_is_closed_with_its_exception(folder: Path, package: str) -> None:
    failed = open_run(folder / package / "failed")

    assert failed.status is RunStatus.FAILED
    assert len(failed.events(0, kinds=[EventKind.STEP])) == 2
    assert "no more disk for the dog pictures" in (failed.ranks[0].failure or "")
