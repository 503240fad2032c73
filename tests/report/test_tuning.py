from dataclasses import replace

import pytest

from fsdp_inspect.advice.tuning import TunedPlan, Tuning, measure_tuning
from fsdp_inspect.report.verification import render_tuning
from fsdp_inspect.simulation.predictions.records import Ruling
from tests.prediction_records import prediction
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
