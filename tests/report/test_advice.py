"""Does advice say of each change what it saves or costs, what memory it takes, and between what?"""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.advice.advise import PlanAdvice
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.advice.suggestions import Suggestion
from fsdp_inspect.report.advice import (
    describe_alternative,
    describe_plan_peak,
    describe_plans,
    describe_saving,
)
from fsdp_inspect.store.reader import open_run
from tests.builders import MIB

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-2-ranks" / "run"
US = 1_000


@pytest.fixture(scope="module")
def plan() -> PlanAdvice:
    advised = advise_run(open_run(SAMPLE), AdviceRequest()).plan
    assert advised is not None
    return replace(advised, replayed_step_ns=128_000 * US)


@pytest.fixture(scope="module")
def suggestion(plan: PlanAdvice) -> Suggestion:
    return plan.suggestions[0]


@pytest.mark.parametrize(
    ("saved", "low", "high", "words"),
    [
        pytest.param(
            4_100, 2_000, 5_000, "saves 4.10 ms a step (3.2%; 2.00 ms to 5.00 ms)", id="saves"
        ),
        pytest.param(
            -4_100, -5_000, -2_000, "costs 4.10 ms a step (3.2%; 2.00 ms to 5.00 ms)", id="costs"
        ),
        pytest.param(
            4_100, -100, 5_000, "saves 4.10 ms a step (3.2%; -100 µs to 5.00 ms)", id="may cost"
        ),
    ],
)
def test_a_saving_and_a_cost_have_their_interval(
    plan: PlanAdvice, suggestion: Suggestion, saved: int, low: int, high: int, words: str
) -> None:
    changed = replace(
        suggestion, saved_ns=saved * US, saved_low_ns=low * US, saved_high_ns=high * US
    )
    assert describe_saving(changed, plan) == words


@pytest.mark.parametrize(
    ("peak", "added", "low", "high", "words"),
    [
        pytest.param(28, 2, 1, 3, "28.0 MiB (+2.00 MiB; +1.00 MiB to +3.00 MiB)", id="more"),
        pytest.param(28, -2, -3, 1, "28.0 MiB (-2.00 MiB; -3.00 MiB to +1.00 MiB)", id="less"),
        pytest.param(28, 2, 2, 2, "28.0 MiB (+2.00 MiB)", id="exact"),
        pytest.param(28, 0, -1, 1, "28.0 MiB as before", id="nothing"),
    ],
)
def test_the_memory_of_a_change_has_its_interval(
    suggestion: Suggestion, peak: int, added: int, low: int, high: int, words: str
) -> None:
    changed = replace(
        suggestion,
        peak_bytes=peak * MIB,
        added_bytes=added * MIB,
        added_low_bytes=low * MIB,
        added_high_bytes=high * MIB,
    )
    assert describe_plan_peak(changed) == words


def test_memory_that_nobody_measured_is_not_known(suggestion: Suggestion) -> None:
    assert describe_plan_peak(replace(suggestion, peak_bytes=None, added_bytes=None)) == "not known"


@pytest.mark.parametrize(
    ("saved", "change"),
    [
        pytest.param(12_800, "-10%", id="faster"),
        pytest.param(1, "0.0%", id="hardly"),
        pytest.param(0, "=", id="no change"),
    ],
)
def test_an_alternative_says_its_memory_and_its_step(
    plan: PlanAdvice, saved: int, change: str
) -> None:
    smallest = replace(
        plan.fastest,
        saved_ns=saved * US,
        step_ns=115_200 * US,
        step_low_ns=110_000 * US,
        step_high_ns=120_000 * US,
        peak_bytes=26 * MIB,
        added_bytes=-2 * MIB,
        peak_low_bytes=25 * MIB,
        peak_high_bytes=27 * MIB,
    )
    assert describe_alternative(smallest, plan) == (
        "peak 26.0 MiB (-2.00 MiB; 25.0 MiB to 27.0 MiB); "
        f"115 ms a step ({change}; 110 ms to 120 ms)"
    )


def test_a_replay_that_is_all_but_right_has_no_sign(plan: PlanAdvice) -> None:
    assert "it is 0.0% off" in describe_plans(replace(plan, replay_error=-0.00001))
