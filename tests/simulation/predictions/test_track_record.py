import pytest

from fsdp_inspect.simulation.predictions.ledger import measure_track_record
from fsdp_inspect.simulation.predictions.records import Ledger, Ruling
from tests.prediction_records import outcome, prediction


def ledger(*rulings, errors=(), **fields):
    made = [prediction(prediction_id=f"p{n}", created_unix_ns=n) for n in range(len(rulings))]
    outcomes = [
        outcome(prediction_id=f"p{n}", ruling=ruling, step_error=error)
        for n, (ruling, error) in enumerate(
            zip(rulings, errors or [None] * len(rulings), strict=True)
        )
        if ruling is not None
    ]
    return Ledger(predictions=tuple(made), outcomes=tuple(outcomes), **fields)


def test_nothing_is_said_where_nothing_was_predicted():
    record = measure_track_record(Ledger())
    assert record.sentence == ""
    assert record.tally.median_step_error is None


def test_what_cannot_be_told_and_what_failed_are_no_verified_predictions():
    made = ledger(
        Ruling.HELD,
        Ruling.HELD,
        Ruling.DID_NOT_HOLD,
        Ruling.CANNOT_BE_TOLD,
        Ruling.FAILED,
        None,
        errors=(0.01, -0.03, 0.2, 0.0, None, None),
    )
    record = measure_track_record(made)
    assert record.sentence == (
        "2 of 3 verified predictions held here; 1 more not significant; 1 did not run to "
        "completion; median error 2% of the step."
    )
    assert record.tally.num_predictions == 6


def test_the_last_outcome_of_a_prediction_counts_and_the_newest_comes_first():
    made = ledger(Ruling.DID_NOT_HOLD, Ruling.HELD)
    again = Ledger(made.predictions, (*made.outcomes, outcome(prediction_id="p0")))
    record = measure_track_record(again)
    assert record.tally.num_held == 2
    assert [each.prediction.prediction_id for each in record.predictions] == ["p1", "p0"]


def test_predictions_of_one_baseline_are_found_with_their_outcomes():
    other = prediction(prediction_id="other", run_id="another")
    record = measure_track_record(Ledger((prediction(), other), (outcome(),)), run_ids=["another"])
    assert [(each.prediction, each.outcome) for each in record.predictions] == [(other, None)]


@pytest.mark.parametrize(("change", "said"), [("forward_prefetch", True), ("units", False)])
def test_predictions_of_one_kind_are_tallied_apart(change, said):
    record = measure_track_record(ledger(Ruling.HELD), changes=[change])
    assert record.sentence.endswith("By change: forward_prefetch 1 of 1.") is said


def test_what_could_not_be_read_is_said():
    assert measure_track_record(Ledger(notes=("A line.",))).notes == ("A line.",)


def test_where_none_could_be_told_no_share_of_none_is_said():
    assert measure_track_record(ledger(None)).sentence == ("No prediction could be judged yet.")
    untold = measure_track_record(ledger(Ruling.CANNOT_BE_TOLD, errors=(0.25,)))
    assert untold.sentence == (
        "No prediction could be judged yet; 1 not significant; median error 25% of the step."
    )
