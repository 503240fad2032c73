import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_inspect.advice.tuning import read_session
from fsdp_inspect.cli.tuner import fill_placeholders, trainer_command, write_configs
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.simulation.predictions.ledger import LEDGER_FILE, read_ledger
from fsdp_inspect.simulation.predictions.records import Ruling
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.plan import Plan
from tests.cli.tuning_session import CONFIG, fake_training, tune


@pytest.mark.slow
@pytest.mark.distributed
def test_a_session_runs_baseline_plan_and_baseline_and_the_prediction_holds(tuned):
    [plan] = tuned.result["plans"]
    verified = plan["verification"]
    assert verified["measured_change"] < -0.2
    assert abs(verified["step_error"]) < 0.05
    # A virtual clock does not stop, so real waits for a core can make the session too busy to
    # judge.
    assert plan["ruling"] in ("held", "cannot_be_told")
    assert verified["answer"].startswith(("Held: ", "Cannot tell: "))
    assert len(tuned.result["baseline_run_ids"]) == 2
    assert "[3/3] the baseline" in tuned.progress


@pytest.mark.slow
@pytest.mark.distributed
def test_the_plan_that_ran_is_the_plan_that_was_predicted(tuned):
    ran = open_run(tuned.run("plan-1-1")).manifest.plan["units"]
    asked = Plan.load(tuned.folder / "plan-1.toml").to_dict()["units"]
    assert tuned.result["plans"][0]["verification"]["plan_differences"] == []
    # The root manages no parameters, so no settings of it are observed.
    assert ran[0]["modules"] == asked[0]["modules"] == [""]
    assert ran[1:] == asked[1:]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_best_plan_is_written_and_measured_to_be_faster(tuned):
    best = tuned.result["best"]
    if best is None:  # on a busy machine, the times do not show the plan
        [only] = tuned.result["plans"]
        assert only["verification"]["has_other_cause"]
        assert tuned.result["answer"].startswith("Cannot tell whether a plan is faster.")
        return
    assert best["is_faster"]
    assert Plan.load(tuned.result["best_plan_file"]) == Plan.load(best["plan_file"])


@pytest.mark.slow
@pytest.mark.distributed
def test_prediction_and_outcome_are_in_the_ledger_of_the_runs(tuned):
    ledger = read_ledger(tuned.folder.parent / LEDGER_FILE)
    assert [each.made_by for each in ledger.predictions] == ["tune"]
    [plan] = tuned.result["plans"]
    assert [outcome.ruling.value for outcome in ledger.outcomes] == [plan["ruling"]]
    assert ledger.predictions[0].created_unix_ns < ledger.outcomes[0].created_unix_ns


@pytest.mark.slow
def test_a_plan_that_runs_out_of_memory_is_an_outcome_and_no_end(tmp_path):
    command = fake_training(tmp_path)
    done = tune(tmp_path / "runs", "--budget", "2", "--", *command)
    first, second = done.result["plans"]
    assert first["ruling"] == "failed"
    assert "CUDA out of memory" in first["failure"]
    assert second["ruling"] == "not_comparable"
    assert "The plan of the run differs" in second["verification"]["answer"]
    assert done.result["best"] is None
    ledger = read_ledger(tmp_path / "runs" / LEDGER_FILE)
    assert [each.ruling for each in ledger.outcomes] == [Ruling.FAILED]
    assert len(ledger.predictions) == 2


@pytest.mark.slow
def test_ctrl_c_keeps_what_has_ended_and_resume_does_the_rest(tmp_path):
    command = fake_training(tmp_path, fails="none")
    words = [sys.executable, "-m", "fsdp_inspect", "tune", "--runs-dir", tmp_path / "runs"]
    slow = ["sh", "-c", 'case "$*" in *plan-1-1*) sleep 600;; esac; "$@"', "sh", *command]
    child = subprocess.Popen(
        [str(word) for word in (*words, "--budget", "1", "--", *slow)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        start_new_session=True,
    )
    _wait_for_log(tmp_path / "runs", "plan-1-1.log")
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 130
    folder = next((tmp_path / "runs").glob("tune-*"))
    assert f"fsdp-inspect tune --resume {folder}" in err
    assert "The session is incomplete" in out
    assert [(each.plan, each.round) for each in read_session(folder).tried] == [(0, 0)]
    session = json.loads((folder / "session.json").read_text())
    session["command"] = command
    (folder / "session.json").write_text(json.dumps(session))
    assert tune(tmp_path / "runs", "--resume", folder).result["is_whole"]
    tried = [(each.plan, each.round) for each in read_session(folder).tried]
    assert tried == [(0, 0), (1, 1), (0, 1)]


def _wait_for_log(runs: Path, name: str) -> None:
    deadline = time.monotonic() + 300
    while not list(runs.glob(f"tune-*/.logs/{name}")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_baseline_that_does_not_run_ends_the_session_with_its_output(invoke, tmp_path):
    script = "import sys; sys.exit('no such data')"
    ended = invoke(
        *("tune", "--runs-dir", tmp_path, "--", sys.executable, "-c", script, "{plan}", "{runs}")
    )
    assert ended.code == 1
    assert "no such data" in ended.err


def test_a_baseline_that_leaves_no_run_says_where_one_was_expected(invoke, tmp_path):
    words = (sys.executable, "-c", "print('done')", "{plan}")
    ended = invoke("tune", "--runs-dir", tmp_path, "--", *words)
    assert ended.code == 1
    assert "recorded no run in the folder of the session ({runs})" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("--", "python", "train.py"), 2, "{plan} is missing in the command"),
        (("--config", "nowhere.toml"), 1, "No settings can be read"),
        (("--steps", "3", "--", "python", "train.py", "{plan}"), 2, "Expected one of them"),
        (("--resume", "nowhere"), 1, "Tuning session not found at 'nowhere'"),
        (("--resume", "nowhere", "--config", "a.toml"), 2, "cannot be combined with --config"),
        (("--memory-limit", "much"), 2, "'much' is not an amount of memory above 0."),
    ],
)
def test_a_mistake_is_named_before_anything_runs(invoke, tmp_path, arguments, code, complaint):
    ended = invoke("tune", "--runs-dir", tmp_path / "runs", *arguments)
    assert ended.code == code
    assert complaint in " ".join(ended.err.replace("│", " ").split())
    assert not (tmp_path / "runs").exists()


def test_a_command_gets_its_plan_and_the_baseline_lacks_the_words_for_it(tmp_path):
    command = ["train.py", "--plan", "{plan}", "--out={runs}/{name}", "--sharding={plan}", "-v"]
    plan = Path("plan-1.toml")
    assert fill_placeholders(command, folder=Path("s"), name="a", plan=plan) == (
        ["train.py", "--plan", "plan-1.toml", "--out=s/a", "--sharding=plan-1.toml", "-v"]
    )
    assert fill_placeholders(command, folder=Path("s"), name="b", plan=None) == [
        "train.py",
        "--out=s/b",
        "-v",
    ]


def test_the_trainer_runs_ranks_or_one_process_that_emulates_them(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    words, ranks = trainer_command(config, num_ranks=None, options=())
    assert ranks == 1
    assert "torch.distributed.run" not in words
    words, ranks = trainer_command(None, num_ranks=4, options=())
    assert ranks == 4
    assert "--nproc-per-node=4" in words


def test_settings_that_a_plan_decides_are_left_out_under_one(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    write_configs(config, tmp_path / "session")
    texts = [path.read_text() for path in sorted((tmp_path / "session").iterdir())]
    assert ["wrap" in text for text in texts] == [False, True]
    assert all("steps = 7" in text for text in texts)


def test_a_config_that_is_no_toml_is_refused(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("steps = ")
    with pytest.raises(FsdpInspectError, match="--print-config"):
        write_configs(config, tmp_path / "session")
