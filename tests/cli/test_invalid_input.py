"""Every error of a command is one line with an exit code, and never a traceback."""

import json
import os

import pytest

from fsdp_inspect.reading import MAX_DEPTH
from tests.builders import steady_run, write_run

DEEP_JSON = '{"a":' * 5000 + "1" + "}" * 5000


@pytest.fixture
def baseline(invoke, tmp_path, memory_run):
    path = tmp_path / "baseline.json"
    assert invoke("check", memory_run, "--baseline", path, "--update").code == 0
    return path


@pytest.fixture(scope="session")
def memory_run():
    """A recorded run with memory for a baseline."""
    from tests.studies.fuzz.corpus import SAMPLE

    return SAMPLE


def is_one_error(ended, code):
    return ended.code == code and "Traceback" not in ended.err and ended.out == ""


@pytest.mark.parametrize("place", ["/dev/zero", "a pipe", "a folder"])
def test_a_baseline_that_is_no_regular_file_cannot_be_judged(invoke, tmp_path, memory_run, place):
    path = tmp_path / "baseline"
    if place == "a pipe":
        os.mkfifo(path)
    elif place == "a folder":
        path.mkdir()
    else:
        path = place
    ended = invoke("check", memory_run, "--baseline", path)
    assert is_one_error(ended, 2)
    assert "Cannot read the baseline" in ended.err


def test_a_baseline_that_is_another_file_is_not_printed(invoke, tmp_path, memory_run):
    path = tmp_path / "zoo.py"
    path.write_text("import zoo\n" * 2000)
    ended = invoke("check", memory_run, "--baseline", path)
    assert is_one_error(ended, 2)
    assert len(ended.err) < 500
    assert "import zoo" not in ended.err


@pytest.mark.parametrize("change", ["nested", "10**400", "wrong plan"])
def test_an_odd_baseline_cannot_be_judged(invoke, baseline, memory_run, change):
    fields = json.loads(baseline.read_text())
    if change == "nested":
        baseline.write_text(DEEP_JSON)
    elif change == "10**400":
        fields["memory"]["peak_allocated_bytes"] = 10**400
        baseline.write_text(json.dumps(fields))
    else:
        fields["run"]["plan"] = "none"
        baseline.write_text(json.dumps(fields))
    assert is_one_error(invoke("check", memory_run, "--baseline", baseline), 2)


def test_a_deep_budget_cannot_be_judged(invoke, tmp_path, memory_run):
    (tmp_path / "budget.toml").write_text("limits = " + "[" * 5000)
    ended = invoke("check", memory_run, "--budget", tmp_path / "budget.toml")
    assert is_one_error(ended, 2)
    assert f"more than {MAX_DEPTH} levels" in " ".join(ended.err.split())


@pytest.mark.parametrize(("command", "code"), [("check", 2), ("summary", 1)])
def test_an_internal_error_is_one_line_with_a_hint(invoke, monkeypatch, runs_folder, command, code):
    def crash(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("fsdp_inspect.store.reader.open_run", crash)
    words = [command, runs_folder / "four", *(["--budget", "b.toml"] if code == 2 else [])]
    ended = invoke(*words)
    assert is_one_error(ended, code)
    assert "internal error: KeyError" in ended.err
    assert "--traceback" in ended.err
    assert "Traceback" in invoke(*words, "--traceback").err


def test_one_broken_manifest_does_not_break_the_list_of_runs(invoke, tmp_path):
    write_run(steady_run(), tmp_path / "whole")
    for name, text in {"deep": DEEP_JSON, "cut": '{"schema_version": 1', "empty": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    ended = invoke("runs", tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("unreadable") == 3
    assert "complete" in ended.out


def test_an_unreachable_url_is_one_error(invoke):
    ended = invoke("summary", "http://127.0.0.1:9/run")
    assert is_one_error(ended, 1)
    assert "127.0.0.1:9" in ended.err


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800", "9" * 5000])
def test_an_odd_name_of_a_run_is_one_error(invoke, name):
    assert is_one_error(invoke("show", name, "summary"), 1)


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 5000, "1.5"])
def test_numbers_out_of_range_are_refused_in_our_own_words(invoke, number):
    ended = invoke("tune", f"--budget={number}")
    assert ended.code == 2
    assert "Expected a whole number from 1" in " ".join(ended.err.replace("│", " ").split())


@pytest.mark.parametrize(
    "words",
    [
        ("forecast", "--preset", "tiny", "--fit", "80"),
        ("advise", "RUN", "--memory-limit", "80"),
        ("tune", "--memory-limit", "80"),
    ],
)
def test_an_amount_of_memory_needs_a_unit(invoke, runs_folder, words):
    ended = invoke(*[runs_folder / "four" if word == "RUN" else word for word in words])
    said = " ".join(ended.err.replace("│", " ").split())
    assert ended.code == 2
    assert "'80' has no unit" in said
    assert "80GiB" in said


def test_a_bare_tune_trains_nothing(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = invoke("tune")
    said = " ".join(ended.err.replace("│", " ").split())
    assert ended.code == 2
    assert "--config FILE" in said
    assert not (tmp_path / "runs").exists()


def test_the_memory_limit_of_readers_is_an_environment_variable(invoke, tmp_path, monkeypatch):
    run = write_run(steady_run(num_steps=50), tmp_path / "run")
    words = ("export", run, "csv", "--out", tmp_path / "tables")
    monkeypatch.setenv("FSDP_INSPECT_MAX_MEMORY", "20kB")
    ended = invoke(*words)
    assert ended.code == 1
    assert "FSDP_INSPECT_MAX_MEMORY=16GiB" in ended.err
    monkeypatch.setenv("FSDP_INSPECT_MAX_MEMORY", "1GiB")
    assert invoke(*words).code == 0


def test_a_new_baseline_names_as_many_metrics_as_the_check_judges(invoke, tmp_path, memory_run):
    path = tmp_path / "baseline.json"
    wrote = invoke("check", memory_run, "--baseline", path, "--update").out
    result = json.loads(invoke("check", memory_run, "--baseline", path, "--json").out)
    assert f"The gate checks {len(result['metrics'])} metrics of memory" in wrote
