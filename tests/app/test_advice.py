"""The Advice page: the library's advice, plans that can be run, and measured results."""

import dataclasses
import re
import shutil

import pytest
from fsdp_inspect_app.app_pages.advice import search
from fsdp_inspect_app.app_pages.advice.charts import ADVISED, draw_front, frame_front
from fsdp_inspect_app.knobs import pack_plan, unpack_plan

from fsdp_inspect.advice.code_change import CodeChange
from fsdp_inspect.advice.evidence import Effect, Finding
from fsdp_inspect.advice.prediction_creation import predict_advised
from fsdp_inspect.advice.request import AdviceRequest, how_to_verify
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.errors import PlanError
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.report.advice import describe_effect, describe_plan_peak, describe_saving
from fsdp_inspect.simulation.predictions.ledger import LEDGER_FILE, append_entries
from fsdp_inspect.simulation.predictions.records import Outcome, Ruling, now
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.version import __version__
from tests.app.conftest import start_app
from tests.app.test_pages import SAMPLES, codes_of, read

RUN = "tiny-2-ranks"


@pytest.fixture(scope="module")
def run():
    return open_run(SAMPLES / RUN)


@pytest.fixture(scope="module")
def advice(run):
    return advise_run(run, AdviceRequest())


@pytest.fixture(scope="module")
def advised():
    return start_app(SAMPLES, "advice", run=RUN)


def test_the_answer_is_that_of_the_library(advised, advice):
    assert not advised.exception
    assert advice.answer in read(advised)
    assert f"Predicted step {format_ns(advice.plan.fastest.step_ns)} instead of" in read(advised)


def test_nothing_of_the_code_is_written_to_the_page(advised):
    assert "how the command and the address say it" not in read(advised)


def test_every_change_says_what_why_and_by_how_much(advised, advice):
    text = read(advised)
    assert advice.plan.suggestions
    for suggestion in advice.plan.suggestions:
        assert suggestion.what in text
        assert f"Predicted: {describe_saving(suggestion, advice.plan)}." in text
        assert f"peak {describe_plan_peak(suggestion)}." in text
        for line in (*suggestion.evidence, *suggestion.risks):
            assert line in text


def test_the_diff_of_the_script_and_its_launch_are_those_of_the_library(
    open_app, advice, monkeypatch
):
    change = CodeChange(
        where="The diff changes the calls in train.py, line 3.",
        diff="--- train.py\n+++ train.py\n@@ -1 +1 @@\n-fully_shard(a)\n+fully_shard(b)",
        settings="fsdp_auto_wrap_policy: NO_WRAP",
        lines="",
        launch="torchrun --nproc-per-node 2 train.py",
        plan_file="",
    )
    suggestion = dataclasses.replace(advice.plan.suggestions[0], change=change)
    plan = dataclasses.replace(
        advice.plan,
        suggestions=(suggestion,),
        change=change,
        verify=how_to_verify(AdviceRequest(), change.launch),
    )
    changed = dataclasses.replace(advice, plan=plan)
    monkeypatch.setattr("fsdp_inspect_app.app_pages.advice.search.advice_of", lambda *_: changed)
    page = open_app(SAMPLES, "advice", run=RUN)
    code = codes_of(page)
    assert code.count(change.diff) == 2
    assert code.count(change.settings) == 2
    assert change.launch in code
    assert advice.plan.snippet not in code
    assert change.where in read(page)


def test_a_change_that_costs_time_says_between_what(open_app, advice, monkeypatch):
    costly = dataclasses.replace(
        advice.plan.suggestions[0],
        saved_ns=-4_000_000,
        saved_low_ns=-5_000_000,
        saved_high_ns=-3_000_000,
    )
    plan = dataclasses.replace(advice.plan, suggestions=(costly,))
    changed = dataclasses.replace(advice, plan=plan)
    monkeypatch.setattr("fsdp_inspect_app.app_pages.advice.search.advice_of", lambda *_: changed)
    text = read(open_app(SAMPLES, "advice", run=RUN))
    assert "Predicted: costs 4.00 ms a step (" in text
    assert "; interval 3.00 ms to 5.00 ms)." in text
    assert f"step {format_ns(costly.step_ns)} instead of" in text


def test_an_alternative_for_less_memory_says_between_what(open_app, advice, monkeypatch):
    smallest = dataclasses.replace(advice.plan.fastest, what="Wrap less at once")
    plan = dataclasses.replace(advice.plan, smallest=smallest)
    changed = dataclasses.replace(advice, plan=plan)
    monkeypatch.setattr("fsdp_inspect_app.app_pages.advice.search.advice_of", lambda *_: changed)
    assert describe_effect(smallest, plan) in read(open_app(SAMPLES, "advice", run=RUN))


def test_the_plan_its_snippet_and_how_to_verify_it_are_there(advised, advice):
    shown = codes_of(advised)
    assert advice.plan.snippet in shown
    assert any("--plan plan.toml" in line for line in shown)
    assert any(line.startswith("fsdp-inspect verify plan.prediction.json") for line in shown)
    labels = [button.label for button in advised.download_button]
    assert "plan.toml" in labels
    assert "plan.prediction.json" in labels


def test_what_no_plan_takes_away_is_said(advised):
    assert (
        "Floor: the first all-gather of forward and the last reduction of backward expose "
        in read(advised)
    )


def test_a_limit_that_no_plan_meets_is_said(open_app):
    app = open_app(SAMPLES, "advice", run=RUN, limit="1MiB")
    assert not app.exception
    assert "fits into 1.00 MiB" in read(app)
    assert app.query_params["limit"] == "1MiB"


def test_a_limit_that_is_none_is_explained(open_app):
    app = open_app(SAMPLES, "advice", run=RUN, limit="much")
    assert not app.exception
    assert (
        "Invalid amount of memory: 'much'. Expected a number above 0 with a unit, such as 80GiB."
        in app.error[0].value.replace("\\", "")
    )


def test_other_dtypes_are_tried_when_asked(open_app, run):
    app = open_app(SAMPLES, "advice", run=RUN, dtypes="1")
    assert advise_run(run, AdviceRequest(allow_dtypes=True)).answer in read(app)


def test_a_plan_of_the_front_is_chosen_by_the_address(open_app, advice):
    app = open_app(SAMPLES, "advice", run=RUN, front="1")
    point = advice.plan.front[1]
    assert f"Predicted: step {format_ns(point.step_ns)}, peak " in read(app)


@pytest.mark.parametrize("front", ["99", "-1", "x"])
def test_a_plan_that_is_not_there_is_as_if_not_named(open_app, front):
    app = open_app(SAMPLES, "advice", run=RUN, front=front)
    assert not app.exception
    assert app.query_params["front"] == "0"


@pytest.mark.parametrize("name", ["whole", "partial", "no-steps", "failed"])
def test_a_run_that_cannot_be_played_says_why_and_what_to_do(shown, name):
    app = shown("advice", name)
    assert not app.exception
    assert "This run cannot be simulated" in read(app)
    assert re.search(r"Expected .*\. .*[Rr]ecord ", read(app))  # the remedy of the error


def test_what_became_of_a_prediction_stands_beside_it(open_app, run, advice, tmp_path):
    shutil.copytree(SAMPLES / RUN, tmp_path / "tiny")
    prediction = predict_advised(run, advice.plan, AdviceRequest())
    outcome = Outcome(
        prediction_id=prediction.prediction_id,
        tool_version=__version__,
        **now(),
        ruling=Ruling.HELD,
        sentence="Held: 10 ms were predicted.",
        run_ids=["<b>after</b>"],
        step_time_ns=10_000_000,
        measured_change=-0.25,
    )
    append_entries(tmp_path / LEDGER_FILE, [prediction, outcome])
    app = open_app(tmp_path, "advice", run="tiny")
    assert not app.exception
    assert "1 of 1 verified predictions held here" in read(app)
    [frame] = [one.value for one in app.dataframe if "outcome" in one.value]
    assert (frame["outcome"][0], frame["step measured"][0]) == ("held", "-25%")
    assert frame["measured step (ms)"][0] == 10.0


def test_a_ledger_above_the_served_folder_is_not_read(open_app, run, advice, tmp_path):
    shutil.copytree(SAMPLES / RUN, tmp_path / "runs" / "tiny")
    append_entries(tmp_path / LEDGER_FILE, [predict_advised(run, advice.plan, AdviceRequest())])
    app = open_app(tmp_path / "runs", "advice", run="tiny")
    assert "predicted beside measured" not in read(app)


def test_the_chart_holds_the_front_and_marks_what_is_advised(advice):
    plans, *marked = draw_front(advice.plan).plots[0]["series"]
    assert plans["at"] == [point.step_ns / 1e6 for point in advice.plan.front]
    [advised] = [one for one in marked if one["label"] == "advised"]
    assert (advised["at"], advised["colour"]) == ([advice.plan.fastest.step_ns / 1e6], ADVISED)
    assert len(frame_front(advice.plan)) == len(advice.plan.front)


def test_without_memory_the_front_draws_nothing_unknown(advice):
    points = [dataclasses.replace(point, peak_bytes=None) for point in advice.plan.front]
    fastest = dataclasses.replace(advice.plan.fastest, peak_bytes=None)
    unknown = dataclasses.replace(
        advice.plan, front=tuple(points), fastest=fastest, replayed_peak_bytes=None
    )
    assert draw_front(unknown) is None


def test_every_plan_of_the_front_can_be_packed_and_read_back(advice):
    for point in advice.plan.front:
        assert unpack_plan(pack_plan(point.plan)) == point.plan


def test_a_plan_of_eighty_blocks_fits_an_address():
    units = [{"modules": [f"layers.{layer}"]} for layer in range(80)]
    packed = pack_plan(Plan.from_dict({"units": units}))
    assert len(packed) < 500


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("!!!", id="no base64"),
        pytest.param("AAAA", id="no deflate"),
        pytest.param("x" * 10_000, id="too long"),
        pytest.param("eJzLSM3JyVcozy_KSVEEABxJBD4", id="no plan"),
        pytest.param("\0", id="NUL"),
        pytest.param("é", id="not ASCII"),
    ],
)
def test_an_address_that_holds_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        unpack_plan(text)


def test_a_bomb_in_the_address_is_refused():
    import base64
    import zlib

    bomb = base64.urlsafe_b64encode(zlib.compress(b" " * 3_000_000, 9)).decode().rstrip("=")
    assert len(bomb) < 6_000
    with pytest.raises(PlanError, match="cut off or too long"):
        unpack_plan(bomb)


def test_advice_for_another_network_and_the_command_that_gives_it(open_app, run):
    app = open_app(SAMPLES, "advice", run=RUN, bandwidth="1GB/s", limit="64MiB")
    assert not app.exception
    wishes = AdviceRequest(memory_limit=64 << 20, bus_bytes_per_s=1e9)
    assert advise_run(run, wishes).answer in read(app)
    words = "--memory-limit 64MiB --bandwidth 1GB/s --write plan.toml"
    assert any(text.endswith(words) for text in codes_of(app))


def test_a_prediction_for_another_network_says_so(run):
    wishes = AdviceRequest(bus_bytes_per_s=1e9)
    other = advise_run(run, wishes)
    prediction = predict_advised(run, other.plan, wishes)
    assert prediction.bus_bytes_per_s == 1e9
    assert prediction.step_time_ns.value == other.plan.fastest.step_ns


def test_a_limit_that_the_recorded_plan_exceeds_shows_the_whole_plan(open_app, run):
    app = open_app(SAMPLES, "advice", run=RUN, limit="24MiB")
    assert not app.exception
    text, limited = read(app), advise_run(run, AdviceRequest(memory_limit=24 * 2**20))
    assert limited.plan.is_whole
    assert limited.answer in text
    assert limited.plan.fastest.what in text
    assert describe_effect(limited.plan.fastest, limited.plan) in text


def test_a_problem_that_comes_first_has_no_plan_beside_it(open_app, monkeypatch, advice):
    finding = Finding(
        rule="",
        units=(),
        sentence="The step is input-bound.",
        evidence="",
        do=("Load batches earlier.", "Leave the plan."),
        limits=True,
        effect=Effect(sentence="Saves at most 4 ms."),
    )
    limited = dataclasses.replace(advice, findings=(finding,), answer=finding.sentence)
    monkeypatch.setattr("fsdp_inspect_app.app_pages.advice.search._ask", lambda *_: limited)
    search._memo.clear()
    text = read(open_app(SAMPLES, "advice", run=RUN))
    search._memo.clear()
    assert "Recommended fix" in text
    assert "(predicted; a new run" not in text
    assert "further finding" not in text
    assert text.count(finding.sentence) == 1
