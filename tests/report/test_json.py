import json
import math
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.report.json import render_json, render_run_json
from fsdp_inspect.trace.run import ClockPair
from tests.builders import steady_run


@dataclass
class Result:
    value: object


def rendered(value):
    return json.loads(render_json(Result(value)))["value"]


def test_a_result_keeps_its_own_names_and_their_order():
    digest = json.loads(render_json(measure_summary(steady_run())))
    assert list(digest)[:4] == ["run_id", "status", "notes", "identity"]
    assert digest["step_time_ns"] == {
        "median": 1000,
        "p10": 1000,
        "p90": 1000,
        "num_steps": 3,
        "typical": 1000,
    }
    assert digest["verdict"]["limit"] == "communication"


def test_a_loss_that_is_not_a_number_is_null():
    assert rendered([math.nan, math.inf, 1.5]) == [None, None, 1.5]


def test_missing_stays_null_and_is_never_zero():
    assert rendered({"peak_reserved_bytes": None}) == {"peak_reserved_bytes": None}


def test_words_paths_and_records_become_plain():
    assert rendered((Limit.INPUT, Path("runs/a"))) == ["input", "runs/a"]
    clock = ClockPair(monotonic_ns=1, unix_ns=2, uncertainty_ns=3)
    assert rendered(clock) == {"monotonic_ns": 1, "unix_ns": 2, "uncertainty_ns": 3}


def test_big_integers_stay_exact():
    assert rendered(2**60 + 1) == 2**60 + 1


def test_what_concerns_one_run_begins_with_the_run_its_source_and_its_notes():
    run = steady_run()
    plain = json.loads(render_run_json(run, Result(1)))
    assert plain == {"run_id": "hand-made", "source": "recorded", "notes": [], "value": 1}
    digest = json.loads(render_run_json(run, measure_summary(run)))
    assert list(digest)[:4] == ["run_id", "source", "notes", "status"]
