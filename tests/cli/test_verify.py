import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.simulation.predictions.ledger import (
    LEDGER_FILE,
    read_ledger,
    write_prediction,
)
from fsdp_inspect.simulation.predictions.records import Ruling
from tests.builders import write_run
from tests.prediction_records import prediction_from, run_of

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture
def quiet(tuned, tmp_path):
    """The session without the samples that show the load of the machine.

    With them, a run on a busy machine is not judged. Its time is that of its emulated link, and
    noise changes it by less than the plan does.
    """
    folder = shutil.copytree(tuned.folder, tmp_path / "quiet")
    for samples in folder.rglob("device.parquet"):
        samples.unlink()
    return replace(tuned, folder=folder)


@pytest.fixture
def told(tmp_path, invoke):
    """A copy of a sample, a prediction of another plan for it, and the path of the prediction."""
    run = tmp_path / "runs" / "before"
    shutil.copytree(SAMPLES / "tiny-2-ranks", run)
    file = tmp_path / "prediction.json"
    ended = invoke("simulate", run, "--reshard-after-forward", "false", "--write-prediction", file)
    assert ended.code == 0, ended.err
    return run, file


@pytest.mark.slow
@pytest.mark.distributed
def test_a_prediction_that_holds_ends_with_0_and_is_kept(quiet, invoke, tmp_path):
    ledger = tmp_path / LEDGER_FILE
    files = (quiet.folder / "plan-1.prediction.json", quiet.run("plan-1-1"))
    ended = invoke("verify", *files, "--history", ledger)
    assert ended.code == 0
    assert ended.out.startswith("Held: predicted -")
    for words in ("step time", "exposed", "peak allocated", "storage tracker", "emulated"):
        assert words in ended.out
    assert [each.ruling for each in read_ledger(ledger).outcomes] == [Ruling.HELD]


@pytest.mark.slow
@pytest.mark.distributed
def test_numbers_are_side_by_side_with_their_intervals(tuned, invoke, tmp_path):
    files = (tuned.folder / "plan-1.prediction.json", tuned.run("plan-1-1"))
    options = ("--json", "--history", tmp_path / LEDGER_FILE)
    result = json.loads(invoke("verify", *files, *options).out)
    step, exposed, peak = result["quantities"]
    for each in (step, exposed, peak):
        assert each["predicted"]["low"] <= each["predicted"]["value"] <= each["predicted"]["high"]
        assert each["measured_low"] <= each["measured"] <= each["measured_high"]
        assert each["ruling"] is not None
    assert abs(peak["error"]) < 0.02
    assert exposed["measured"] < exposed["baseline"]
    assert sum(unit["measured_ns"] for unit in result["units"]) > 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_prediction_that_does_not_hold_ends_with_1(quiet, invoke, tmp_path):
    file = tmp_path / "wrong.json"
    wrong = json.loads((quiet.folder / "plan-1.prediction.json").read_text())
    wrong["step_time_ns"] = {"value": 10**6, "low": 10**6, "high": 2 * 10**6}
    file.write_text(json.dumps(wrong))
    ended = invoke("verify", file, quiet.run("plan-1-1"), "--history", tmp_path / LEDGER_FILE)
    assert ended.code == 1
    assert ended.out.startswith("Did not hold: predicted -9")


@pytest.mark.slow
@pytest.mark.distributed
def test_new_advice_says_how_earlier_predictions_came_out(tuned, invoke):
    [outcome] = read_ledger(tuned.folder.parent / LEDGER_FILE).outcomes
    is_judged, is_held = outcome.ruling is not Ruling.CANNOT_BE_TOLD, outcome.ruling is Ruling.HELD
    ended = invoke("advise", tuned.run("baseline-0"), "--details")
    expected = f"{int(is_held)} of 1 verified predictions held here"
    assert (expected in " ".join(ended.out.split())) is is_judged
    result = json.loads(invoke("advise", tuned.run("baseline-0"), "--json").out)
    assert result["track_record"]["num_held"] == int(is_held)
    assert result["track_record"]["num_verified"] == int(is_judged)


@pytest.mark.parametrize(
    ("compute", "waiting", "code", "answer"),
    [(70, 10, 0, "Held"), (70, 30, 1, "Did not hold"), (91, 10, 2, "Cannot tell")],
)
def test_the_exit_code_says_whether_the_prediction_held(
    tmp_path, invoke, compute, waiting, code, answer
):
    before = run_of("before", compute=70, waiting=30)
    write_run(before, tmp_path / "before")
    write_run(run_of("after", compute=compute, waiting=waiting), tmp_path / "after")
    write_prediction(prediction_from(before), tmp_path / "p.json")
    ended = invoke("verify", tmp_path / "p.json", tmp_path / "after")
    assert (ended.code, ended.out.partition(":")[0]) == (code, answer)
    assert "Wrote the outcome to" in ended.out


def test_a_run_of_another_plan_cannot_be_judged_and_is_named(told, invoke):
    run, file = told
    other = run.with_name("after")
    shutil.copytree(SAMPLES / "async-prefetch-2-ranks", other)
    ended = invoke("verify", file, other)
    assert ended.code == 2
    words = " ".join(ended.out.split())
    assert words.startswith("Cannot be judged: ")
    assert "The plan of the run differs from the predicted plan." in words
    assert "Difference in reshard_after_forward of" in words
    assert "No outcome is written." in words
    assert not (run.parent / LEDGER_FILE).exists()


def test_the_baseline_itself_cannot_be_judged(told, invoke):
    run, file = told
    ended = invoke("verify", file, run)
    assert ended.code == 2
    assert "is the baseline of the prediction" in " ".join(ended.out.split())


def test_a_run_under_other_circumstances_cannot_be_judged(told, invoke):
    run, file = told
    fields = json.loads(file.read_text())
    fields["circumstances"]["torch"] = "2.9.0"
    file.write_text(json.dumps(fields))
    words = " ".join(invoke("verify", file, run).out.split())
    assert "The torch version is" in words
    assert "Expected '2.9.0'." in words


def test_a_run_that_is_given_twice_is_refused(told, invoke):
    run, file = told
    ended = invoke("verify", file, run, run)
    assert ended.code == 2
    assert "is given 2 times" in ended.err


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("nowhere.json", "Cannot read a prediction from"),
        (
            SAMPLES / "tiny-2-ranks" / "run.json",
            "its format is not 'fsdp-inspect prediction'",
        ),
    ],
)
def test_a_file_that_is_no_prediction_ends_with_2(invoke, file, complaint):
    ended = invoke("verify", file, SAMPLES / "tiny-2-ranks")
    assert ended.code == 2
    assert complaint in ended.err


def test_a_prediction_is_not_written_over_a_file(told, invoke):
    run, file = told
    before = file.read_text()
    assert invoke("simulate", run, "--write-prediction", file).code == 2
    assert file.read_text() == before


def test_a_written_plan_has_its_prediction_beside_it(told, invoke, tmp_path):
    run, _ = told
    ended = invoke("advise", run, "--write", tmp_path / "plan.toml")
    assert ended.code == 0
    assert f"fsdp-inspect verify {tmp_path / 'plan.prediction.json'} NEW_RUN" in ended.err
    fields = json.loads((tmp_path / "plan.prediction.json").read_text())
    assert fields["made_by"] == "advise"
    assert fields["step_time_ns"]["value"] < fields["replayed_step_ns"]
    assert fields["units"]
