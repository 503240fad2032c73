"""Compare a prediction with the runs of its plan; the machine's effect on compute is separated."""

from dataclasses import replace
from typing import Any

import pytest

from fsdp_inspect.comparison.verification.verification import Verification, verify_prediction
from fsdp_inspect.simulation.predictions.records import Ruling
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import RunBuilder
from tests.prediction_records import MS, PLAN, UNITS, prediction_from, run_of


def verified(after: RunSource, **fields: Any) -> Verification:
    """The verification of a prediction of 80 ms from 100 ms a step."""
    before = run_of("before", compute=70, waiting=30)
    return verify_prediction(prediction_from(before, **fields), [after], [before])


def test_a_prediction_that_came_true_held_with_the_compute_of_the_baseline():
    held = verified(run_of("after", compute=70, waiting=10))
    assert (held.ruling, held.compute_change, held.caveats) == (
        Ruling.HELD, 0.0, ("Memory is not predicted: the baseline has no memory step.",),
    )  # fmt: skip


def test_a_baseline_with_a_memory_step_is_not_said_to_have_none():
    held = verified(run_of("after", compute=70, waiting=10), recorded_peak_bytes=1 << 20)
    assert held.caveats == (
        "Memory is not predicted: the baseline does not show that of this plan.",
    )


@pytest.mark.parametrize(("waiting", "is_outside"), [(10, False), (17, True)])
def test_a_step_outside_the_interval_by_less_than_the_noise_is_said(waiting, is_outside):
    held = verified(run_of("after", compute=70, waiting=waiting))
    assert held.ruling is Ruling.HELD
    said = "The step is outside the predicted 78.0 ms to 82.0 ms, by less than the noise."
    assert (said in held.answer) is is_outside


def test_a_plan_that_changes_the_loss_is_not_only_faster():
    harmful = verified(run_of("after", compute=70, waiting=10, loss=3.0))
    assert harmful.ruling is Ruling.HELD
    assert harmful.caveats[-1] == (
        "loss is 1 in the baseline and 3 in the run (median of 9 values up to step 8). This "
        "comparison does not show why."
    )


def test_a_busier_machine_is_told_from_a_wrong_prediction():
    busy = verified(run_of("after", compute=91, waiting=10))
    assert busy.compute_change == pytest.approx(0.3)
    # Off by 19 ms, and compute by 21.
    assert (busy.ruling, busy.has_other_cause) == (Ruling.CANNOT_BE_TOLD, True)
    assert busy.caveats[0].startswith(
        "Compute takes 30% more time than in the baseline (baseline 70.0 ms, run 91.0 ms)"
    )
    assert busy.answer.startswith("Cannot tell: predicted ")


@pytest.mark.parametrize(("beside", "rest"), [(20, 50), (40, 30)])
def test_compute_that_communication_slows_is_not_blamed_on_the_machine_alone(
    beside: int, rest: int
):
    """20 ms of work run beside a gather, and equal work alone; both runs compute for 90 ms."""
    builder = RunBuilder(UNITS, run_id="after", plan=PLAN)
    rank = builder.rank(0)
    for number in range(6):
        begin = number * 90 * MS
        gathered, turn, end = (begin + at * MS for at in (beside, beside + 20, beside + 20 + rest))
        rank.step(number, begin, end)
        rank.all_gather("layers.0", begin, gathered)
        rank.forward("layers.0", begin, gathered)
        rank.forward("layers.1", gathered, turn)
        rank.backward("layers.1", turn, end)
    found = verified(builder.build())
    is_slowed = beside > 20
    said = found.caveats[0]
    assert said.startswith("Compute takes 28.6% more time")
    assert ("takes 2.00 times as long during communication" in said) == is_slowed
    assert ("probably busier" in said) == (not is_slowed)
    assert ("Communication that slows compute may be the cause" in found.answer) == is_slowed
    assert found.ruling is Ruling.CANNOT_BE_TOLD


def test_a_plan_that_changes_compute_has_no_such_excuse():
    wrong = verified(run_of("after", compute=91, waiting=10), changes=["checkpointing"])
    assert (wrong.ruling, wrong.compute_change) == (Ruling.DID_NOT_HOLD, None)


def test_other_units_may_change_compute_a_little():
    found = verified(run_of("after", compute=91, waiting=10), changes=["units"])
    assert found.ruling is Ruling.CANNOT_BE_TOLD
    assert "and other units usually change it by less than 8.5%. The machine" in found.caveats[0]


def test_waits_that_do_not_fall_are_a_wrong_prediction():
    wrong = verified(run_of("after", compute=70, waiting=30))
    assert (wrong.ruling, wrong.compute_change) == (Ruling.DID_NOT_HOLD, 0.0)


def test_compute_that_the_plan_was_predicted_to_add_is_no_busier_machine():
    wrong = verified(run_of("after", compute=84, waiting=10), paid_ns=14 * MS)
    assert (wrong.ruling, wrong.compute_change) == (Ruling.DID_NOT_HOLD, 0.0)  # off by 12 ms
    assert len(wrong.caveats) == 1


def test_what_the_plan_adds_is_scaled_to_the_measured_baseline_and_named():
    busy = verified(
        run_of("after", compute=91, waiting=10), paid_ns=14 * MS, replayed_step_ns=200 * MS
    )
    assert busy.compute_change == pytest.approx(0.2)
    assert busy.caveats[0].startswith(
        "Compute takes 20% more time than in the baseline (baseline 70.0 ms, run 91.0 ms, "
        "including 7.00 ms for hiding communication), and the plan does not explain the rest"
    )


def with_waits(waited: int) -> RunSource:
    after = run_of("after", compute=70, waiting=30)
    samples = DeviceTable.from_rows(
        [
            {**dict.fromkeys(DeviceTable.DTYPES, -1), "time_ns": time, "run_delay_ns": delay}
            for time, delay in ((0, 0), (300 * MS, waited * MS))
        ]
    )
    return replace(after, device_tables={0: samples})


@pytest.mark.parametrize(("waited", "ruling"), [(0, "did_not_hold"), (30, "cannot_be_told")])
def test_other_programs_on_the_machine_make_a_verdict_impossible(waited: int, ruling: str):
    found = verified(with_waits(waited))
    assert found.ruling == ruling
    assert any("no core for 10% of the time" in each for each in found.caveats) == bool(waited)


@pytest.mark.parametrize(
    ("predicted_from", "said"),
    [
        (0.02, "for 10% of the time, and for 2% in the baseline."),
        (0.3, "for 10% of the time, and for 30% in the baseline."),
        (0.09, None),
        (None, "for 10% of the time. That of the baseline is unknown, so the times do not show"),
    ],
)
def test_without_runs_of_the_baseline_its_machine_is_that_of_the_prediction(predicted_from, said):
    before = run_of("before", compute=70, waiting=30)
    prediction = prediction_from(before, run_delay_ratio=predicted_from)
    found = " ".join(verify_prediction(prediction, [with_waits(30)]).caveats)
    assert said in found if said else "no core" not in found
