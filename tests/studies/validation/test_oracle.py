"""Predictions against torch's own code on virtual streams, without noise."""

from tests.studies.validation.oracle import judge_played, judge_predicted
from tests.studies.validation.outcomes import Errors


def test_known_work_is_played_as_torch_plays_it():
    outcomes = judge_played(8, lambda: None)
    assert [each.step_error for each in outcomes] == [0.0] * 8
    assert {error for each in outcomes for error in each.exposed_errors} == {0.0}


def test_another_plan_link_and_host_is_predicted_from_a_recording():
    outcomes = judge_predicted(6, lambda: None)
    assert Errors.of([each.step_error for each in outcomes]).worst < 0.001
    assert Errors.of([e for each in outcomes for e in each.exposed_errors]).worst < 0.001
