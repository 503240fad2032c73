import io
import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fsdp_inspect.cli import main
from fsdp_inspect.trace.plan import Plan

SAMPLES = Path(__file__).parents[2] / "samples"
SAMPLE = SAMPLES / "tiny-2-ranks"


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in SAMPLES.glob("*/run.json")), ids=lambda p: p.name
)
def test_the_first_line_answers_and_the_advice_fits_on_one_screen_of_80_by_24(invoke, folder):
    lines = invoke("advise", folder).out.splitlines()
    assert re.search(r"\d%? .*step|No change surely saves time: predicted -?\d", lines[0])
    assert lines[0][0].isupper()
    assert len(lines[0].split()) <= 12
    assert lines[1] == ""
    assert sum(max(-(-len(line) // 80), 1) for line in lines) <= 23
    assert max(len(line) for line in lines if not line.startswith("      ")) <= 80  # code is whole


@pytest.fixture(scope="module")
def advised():
    """The plan of `fsdp-inspect advise --json`."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["fsdp-inspect", "advise", str(SAMPLE), "--json"])
        with pytest.raises(SystemExit):
            main()
    return json.loads(out.getvalue())["plan"]


def test_details_show_all_changes_and_earlier_predictions(invoke, advised):
    short = invoke("advise", SAMPLE).out
    full = invoke("advise", SAMPLE, "--details").out
    number = len(advised["suggestions"])
    assert f"  {number}. " in full
    assert f"  {number}. " not in short
    assert full.splitlines()[0] == short.splitlines()[0]
    assert "Verify the plan" in full
    assert "Verify the plan" not in short


def test_the_commands_name_the_run_also_if_its_parent_was_given(invoke, tmp_path):
    shutil.copytree(SAMPLE, tmp_path / "runs" / SAMPLE.name)
    lines = invoke("advise", tmp_path / "runs", "--details").out.splitlines()
    [verify] = [line.strip() for line in lines if "fsdp-inspect verify" in line]
    assert verify.endswith(f"NEW_RUN --baseline {tmp_path / 'runs' / SAMPLE.name}")


def test_every_suggestion_says_its_rule_interval_evidence_and_memory(advised):
    result = advised
    assert result["suggestions"]
    for each in result["suggestions"]:
        assert each["rules"]
        assert each["evidence"]
        assert each["saved_low_ns"] <= each["saved_ns"] <= each["saved_high_ns"]
        assert each["added_low_bytes"] <= each["added_bytes"] <= each["added_high_bytes"]
        assert all(row["exposed_ns"] for row in each["rows"])
        assert each["assumptions"]
        assert each["snippet"]
        assert each["plan"]["units"]
        assert each["verify"][-1].startswith("fsdp-inspect verify plan.prediction.json ")
    assert "fsdp_inspect.apply_plan(model, plan)" in result["snippet"]
    write, launch, verify = result["verify"]
    assert write.endswith(" --write plan.toml")
    assert "--plan plan.toml" in launch
    assert "verify plan.prediction.json NEW_RUN" in verify


def test_the_advised_plan_can_be_written_and_takes_the_advised_time(invoke, tmp_path):
    file = tmp_path / "plan.toml"
    limit = ("--memory-limit", "27MiB")
    advised = json.loads(invoke("advise", SAMPLE, *limit, "--write", file, "--json").out)["plan"]
    again = json.loads(invoke("simulate", SAMPLE, "--plan", file, "--json").out)["predicted"]
    assert Plan.load(file).units
    assert again["step_time_ns"] == advised["fastest"]["step_ns"]
    assert again["peak_bytes"] == advised["fastest"]["peak_bytes"] <= 27 * 2**20


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--memory-limit", "much"), "'much' is not an amount of memory above 0."),
        (("--memory-limit", "0GiB"), "'0GiB' is not an amount of memory above 0."),
        (("--write", SAMPLE), "already exists. Expected a new file."),
        (("--write", SAMPLE / "run.json" / "plan.toml"), "run.json is not a folder."),
        (("--take", "1"), "Missing --write"),
        (("--take", "0", "--write", "plan.toml"), "Expected a whole number from 1"),
    ],
)
def test_a_mistake_is_named_before_anything_is_played(invoke, options, complaint):
    ended = invoke("advise", SAMPLE, *options)
    assert ended.code == 2
    assert complaint in " ".join(ended.err.replace("│", " ").split())


def test_a_run_that_cannot_be_simulated_is_told_why(invoke, runs_folder):
    ended = invoke("advise", runs_folder / "steady")
    assert ended.code == 0
    assert "No plan is offered" in ended.out
    assert "no observed plan" in " ".join(ended.out.split())


def test_the_first_change_is_written_predicted_and_verified_alone(invoke, advised, tmp_path):
    """The command that writes the plan again would write all changes."""
    file = tmp_path / "plan.toml"
    first = advised["suggestions"][0]
    ended = invoke("advise", SAMPLE, "--take", "1", "--write", file, "--json")
    assert ended.code == 0
    prediction = json.loads((tmp_path / "plan.prediction.json").read_text())
    assert prediction["step_time_ns"]["value"] == first["step_ns"]
    assert prediction["what"] == first["what"]
    assert Plan.load(file) == Plan.from_dict(prediction["plan"])
    assert " --take 1 --write plan.toml" in first["verify"][0]
    plan = json.loads(ended.out)["plan"]
    assert len(plan["suggestions"]) > 1
    assert plan["change"] == plan["suggestions"][0]["change"]
    assert plan["verify"] == plan["suggestions"][0]["verify"]
    assert [line for line in plan["verify"] if "advise" in line.split()] == []
    second = plan["suggestions"][1]["verify"][0]
    assert f" --take 2 --write {file}" in second


def test_more_changes_than_were_suggested_cannot_be_taken(invoke, tmp_path):
    ended = invoke("advise", SAMPLE, "--take", "9", "--write", tmp_path / "plan.toml")
    assert ended.code == 2
    assert "Invalid number of changes: 9. Expected at most 3" in " ".join(
        ended.err.replace("│", " ").split()
    )
    assert not (tmp_path / "plan.toml").exists()


def test_the_rules_can_be_read_without_a_run(invoke):
    ended = invoke("advise", "--rules")
    assert ended.code == 0
    for number in range(1, 35):
        assert f"R{number}: " in ended.out
    assert "Not detected: " in ended.out
