import pytest
from pydantic import ValidationError

from fsdp_inspect.simulation.predictions.records import Estimate
from tests.prediction_records import MS, prediction


def test_a_change_is_against_the_replayed_baseline():
    assert prediction(replayed_step_ns=160 * MS, recorded_step_ns=150 * MS).change == -0.5


@pytest.mark.parametrize(
    ("measured", "distance"), [(7, 3), (10, 0), (15, 0), (20, 0), (24, 4)], ids=str
)
def test_distance_is_how_far_a_number_lies_outside(measured, distance):
    assert Estimate(value=15, low=10, high=20).distance(measured) == distance


def test_an_interval_must_hold_its_value():
    with pytest.raises(ValidationError, match="low <= value <= high"):
        Estimate(value=5, low=6, high=7)
