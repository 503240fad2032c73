import json

import pytest

from fsdp_inspect.errors import PredictionError
from fsdp_inspect.simulation.predictions.ledger import (
    prediction_file_of,
    read_prediction,
    write_prediction,
)
from tests.prediction_records import prediction


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "plan.prediction.json"
    write_prediction(prediction(), path)
    return path


def test_a_prediction_comes_back_as_it_was(path):
    assert read_prediction(path) == prediction()


def test_a_prediction_lies_beside_its_plan(path):
    assert prediction_file_of(path.with_name("plan.toml")) == path


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"schema_version": 2}, "has schema version 2.*Update fsdp-inspect"),
        ({"step_time_ns": {"value": 5, "low": 6, "high": 7}}, "low <= value <= high"),
        ({"recorded_step_ns": 0}, "recorded_step_ns is 0. Expected greater than 0"),
        ({"run_id": None}, "run_id is None"),
        ({"format": "a poem"}, "its format is not 'fsdp-inspect prediction'"),
    ],
)
def test_a_value_that_is_not_legal_is_named(path, changes, complaint):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(PredictionError, match=complaint):
        read_prediction(path)


def test_a_plan_in_its_place_points_to_the_prediction_beside_it(path):
    plan = path.with_name("plan.toml")
    plan.write_text("version = 1\n")
    with pytest.raises(PredictionError, match=r"Did you mean '.*plan\.prediction\.json'"):
        read_prediction(plan)


def test_a_file_that_is_not_there_says_how_to_write_one(tmp_path):
    with pytest.raises(PredictionError, match="--write-prediction"):
        read_prediction(tmp_path / "nothing.json")


def test_a_place_that_cannot_be_written_is_named(path):
    with pytest.raises(PredictionError, match="Cannot write the prediction to"):
        write_prediction(prediction(), path / "below-a-file.json")
