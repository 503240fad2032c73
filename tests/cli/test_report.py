import json

import pytest


def test_one_run_becomes_a_report(invoke, runs_folder, tmp_path):
    out = tmp_path / "report.html"
    ended = invoke("report", runs_folder / "steady", "--out", out)
    assert (ended.code, str(out) in ended.out.replace("\n", "")) == (0, True)
    assert "Parts of the step" in out.read_text()


def test_several_runs_become_a_comparison(invoke, runs_folder, tmp_path):
    out = tmp_path / "change.html"
    invoke("report", runs_folder / "steady", runs_folder / "four", "--out", out)
    text = out.read_text()
    assert "<h2>Settings" in text
    assert "world_size" in text


@pytest.mark.parametrize("name", ["report.pdf", "report"])
def test_a_name_that_a_browser_would_not_know_is_refused(invoke, runs_folder, tmp_path, name):
    ended = invoke("report", runs_folder / "steady", "--out", tmp_path / name)
    assert ended.code == 2
    assert f"{name}.html" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_replaced_only_with_force(invoke, runs_folder, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("mine")
    refused = invoke("report", runs_folder / "steady", "--out", out)
    assert (refused.code, out.read_text()) == (1, "mine")
    assert "--force" in refused.err
    assert invoke("report", runs_folder / "steady", "--out", out, "--force").code == 0


def test_a_failing_report_leaves_nothing(invoke, tmp_path):
    ended = invoke("report", tmp_path / "nowhere", "--out", tmp_path / "report.html")
    assert ended.code == 1
    assert list(tmp_path.iterdir()) == []


def test_programs_are_told_what_was_written(invoke, runs_folder, tmp_path):
    out = tmp_path / "report.html"
    told = json.loads(invoke("report", runs_folder / "steady", "--out", out, "--json").out)
    assert (told["path"], told["bytes"]) == (str(out), out.stat().st_size)
    assert told["runs"] == ["steady"]
    assert told["sections"][0] == "Parts of the step"
    several = [runs_folder / "steady", runs_folder / "four"]
    told = json.loads(invoke("report", *several, "--out", out, "--force", "--json").out)
    assert told["runs"] == ["steady", "four"]
