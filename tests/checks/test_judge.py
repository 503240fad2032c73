"""Which limit holds where none is written, and what is refused as no comparison?"""

import dataclasses

import pytest

from fsdp_inspect import forecast_memory, open_run
from fsdp_inspect.checks.baseline import make_baseline
from fsdp_inspect.checks.judge import Outcome, check
from fsdp_inspect.checks.reading import Reading, read_runs
from tests.checks.planted import build


@pytest.fixture(scope="module")
def reading(tmp_path_factory) -> Reading:
    path = forecast_memory(build, tmp_path_factory.mktemp("x") / "f", world_size=4)
    return read_runs([open_run(path)])


def changed(reading: Reading, by: float = 1.0, **manifest) -> Reading:
    memory = {name: round(amount * by) for name, amount in reading.memory.items()}
    other = reading.manifest.model_copy(update=manifest)
    return dataclasses.replace(reading, memory=memory, manifest=other)


def test_a_forecast_is_held_to_the_byte(reading):
    result = check(changed(reading, 1.0001), make_baseline(reading))

    assert result.outcome is Outcome.REGRESSION


@pytest.mark.parametrize(("by", "outcome"), [(1.09, "holds"), (1.11, "regression")])
def test_real_ranks_may_vary_by_a_tenth(reading, by, outcome):
    recorded = changed(reading, source="recorded")
    grown = changed(recorded, by)
    memory = {**grown.memory, "resting_bytes": recorded.memory["resting_bytes"]}

    result = check(dataclasses.replace(grown, memory=memory), make_baseline(recorded))

    assert result.outcome == outcome


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"world_size": 8}, "world size 4"),
        ({"versions": {"torch": "2.14.0"}}, "torch 2.13.0"),
        ({"device_type": "cuda"}, "device fake"),
        ({"source": "recorded"}, "source predicted"),
    ],
    ids=["world size", "torch", "device", "source"],
)
def test_a_baseline_of_something_else_is_no_comparison(reading, manifest, words):
    result = check(changed(reading, 2.0, **manifest), make_baseline(reading))

    assert result.exit_code == 2
    assert words in result.reasons[0]
    assert "--update" in result.reasons[0]


def test_a_plan_that_was_changed_on_purpose_is_no_regression(reading):
    before = changed(reading, config={"wrap": "block"})
    after = changed(reading, 2.0, config={"wrap": "every:2"})

    result = check(after, make_baseline(before))

    assert result.exit_code == 2
    assert "changed on purpose: wrap" in result.reasons[0]


@pytest.mark.parametrize(
    ("times", "exit_code"),
    [
        ((1000, 1001, 1002, 1003, 1004), 0),
        ((1500, 1501, 1502, 1503, 1504), 1),
        ((990, 1000, 1350), 2),
        ((900, 1000, 1010, 1100, 1250), 2),
    ],
    ids=["alike", "slower", "too few", "noisy"],
)
def test_times_hold_rise_or_cannot_be_told(reading, times, exit_code):
    before = dataclasses.replace(reading, times={"step_time_ns": (1000, 1001, 1002, 1003, 1004)})
    after = dataclasses.replace(reading, times={"step_time_ns": times})

    assert check(after, make_baseline(before)).exit_code == exit_code
