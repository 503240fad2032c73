"""Test that the check finds each planted regression, and states its right cause or none.

The ranks start once for all plants, and train on gloo.
"""

from pathlib import Path

import pytest

from fsdp_inspect.comparison.gate.baseline import make_baseline
from tests.conftest import STUDIES, Torchrun
from tests.studies.planted import training
from tests.studies.planted.regressions import (
    EXPECTED,
    FORECAST,
    RECORDED,
    Outcome,
    check_all,
    check_reruns,
    forecast_all,
    read,
)
from tests.studies.planted.training import OFFLOADED, PLANTS

RERUNS = 2
RECORDED_EACH_CHANGE = (
    *("nothing", "no reshard after forward", "a block left unwrapped", "no_sync"),
    *("eager attention without a setting", "checkpointing off in one block", "amsgrad"),
    *("a list that keeps activations", "a bigger batch", "a kept scalar"),
    "state kept, logits in float32",
)
"""The plants that every change is tested with; the recordings of the others are a study."""

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun
) -> Path:
    """A recorded run of each plant."""
    folder = tmp_path_factory.mktemp("recorded")
    names = PLANTS if request.config.getoption(STUDIES) else RECORDED_EACH_CHANGE
    plants = [word for plant in names if plant != "nothing" for word in ("--plant", plant)]
    run_ranks(training.__file__, folder, *plants, "--reruns", str(RERUNS), timeout_s=600)
    return folder


@pytest.fixture(scope="module")
def outcomes(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Outcome]:
    """The check of each plant, by kind and name."""
    forecasts = tmp_path_factory.mktemp("forecasts")
    forecast_all(forecasts)
    found = [*check_all(recorded, RECORDED), *check_all(forecasts, FORECAST)]
    return {(one.kind, one.plant): one for one in found}


def test_every_plant_has_an_expected_outcome() -> None:
    assert {*EXPECTED} == {*PLANTS, *OFFLOADED} - {"offloaded"}


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, marks=[pytest.mark.study] * (plant not in RECORDED_EACH_CHANGE))
        for plant in PLANTS
    ],
)
def test_a_recorded_plant_has_its_right_cause_or_none(
    outcomes: dict[tuple[str, str], Outcome], plant: str
) -> None:
    assert list(outcomes[RECORDED, plant].problems()) == []


@pytest.mark.parametrize("plant", EXPECTED)
def test_a_forecast_plant_has_its_right_cause_or_none(
    outcomes: dict[tuple[str, str], Outcome], plant: str
) -> None:
    assert list(outcomes[FORECAST, plant].problems()) == []


def test_unchanged_reruns_raise_no_alarm(recorded: Path) -> None:
    baseline = make_baseline(read(recorded / "nothing"))
    results = list(check_reruns(recorded, baseline))

    assert [result.exit_code for result in results] == [0] * RERUNS
