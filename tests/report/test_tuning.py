from dataclasses import replace

import pytest

from fsdp_inspect.advice.tuning import Trial, TunedPlan, Tuning, measure_tuning
from fsdp_inspect.report.verification import render_tuning
from fsdp_inspect.simulation.predictions.records import Ruling
from tests.prediction_records import prediction, prediction_from, run_of
from tests.report.terminal_text import text_of


def plan(number: int, **fields) -> TunedPlan:
    plain = {
        "number": number,
        "what": f"Try number {number}",
        "plan_file": f"plan-{number}.toml",
        "prediction": prediction(),
        "ruling": None,
        "verification": None,
        "outcome": None,
        "failure": None,
        "is_faster": False,
    }
    return TunedPlan(**{**plain, **fields})


@pytest.fixture
def tuning() -> Tuning:
    empty = measure_tuning([], [], [], memory_limit=None, is_whole=False)
    failed = plan(1, ruling=Ruling.FAILED, failure="CUDA out of memory")
    return replace(empty, plans=(failed, plan(2)), baseline_step_ns=100_000_000)


def test_no_plan_worth_a_run_says_change_nothing():
    empty = measure_tuning([], [], [], memory_limit=None, is_whole=True)
    text = text_of(render_tuning(empty, ["Go home"]))
    assert text.startswith("Change nothing:")
    assert "not done" not in text
    assert "Go home" in text


def test_a_plan_that_failed_says_why_and_one_that_has_not_run_says_so(tuning):
    text = text_of(render_tuning(tuning, []))
    assert "The session is incomplete" in text
    assert "Failed: CUDA out of memory." in text
    rows = [line for line in text.splitlines() if "80.0 ms (-20%)" in line]
    assert [row.split()[-1] for row in rows] == ["failed", "run"]


def test_the_table_fits_80_columns(tuning):
    lines = text_of(render_tuning(tuning, [])).splitlines()
    assert max(map(len, lines)) <= 80


def test_a_plan_is_not_the_best_one_if_the_machine_may_have_changed_the_times():
    """Compute takes 91 ms in the baseline and 60 ms in the plan, which changes a prefetch only."""
    before, after = (
        run_of("before", compute=91, waiting=30),
        run_of("after", compute=60, waiting=10),
    )
    trial = Trial(1, prediction_from(before), "plan-1.toml", (after,), None)
    tuning = measure_tuning([trial], [before], [], memory_limit=None, is_whole=True)
    assert tuning.best is None
    assert tuning.answer.startswith("Cannot tell whether a plan is faster. The fastest measured")
    text = " ".join(text_of(render_tuning(tuning, [])).split())
    assert "Cannot tell: predicted" in text
    assert "cannot tell" in text
