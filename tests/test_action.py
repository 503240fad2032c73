"""Run the shell steps of the GitHub Action and the GitLab job."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from fsdp_inspect import forecast_memory
from fsdp_inspect.comparison.gate.baseline import make_baseline, render_baseline
from fsdp_inspect.comparison.gate.measurements import read_runs
from fsdp_inspect.store.reader import open_run
from tests.cases import mark_slow
from tests.comparison.gate.changed_models import build

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github" / "actions" / "fsdp-check"
PLANTED = ROOT / "tests" / "comparison" / "gate" / "changed_models.py"


@dataclass
class Ended:
    code: int
    log: str
    summary: str
    outputs: dict[str, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The forecasts `nothing` and `leak`, and `baseline.json` of the first."""
    folder = tmp_path_factory.mktemp("made")
    for plant in ("nothing", "leak"):
        forecast_memory(build, folder / plant, world_size=4, settings={"plant": plant})
    baseline = make_baseline(read_runs([open_run(folder / "nothing")]))
    (folder / "baseline.json").write_text(render_baseline(baseline))
    return folder


def run_action(folder: Path, **inputs: str) -> Ended:
    """Run the steps of the action in `folder`, like GitHub's runner."""
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    known = {name: str(one["default"]) for name, one in action["inputs"].items()}
    given = {name.replace("_", "-"): value for name, value in inputs.items()}
    assert set(given) <= set(known)
    values = {**known, "python": sys.executable, **given}
    log, code = "", 0
    for step in action["runs"]["steps"]:
        environment = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: values[m[1]], str(text))
            for name, text in step["env"].items()
        }
        environment |= {
            "GITHUB_ACTION_PATH": str(ACTION),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            "GITHUB_OUTPUT": str(folder / "outputs"),
        }
        code, printed = run_bash(step["run"], folder, environment)
        log += printed
        if code:
            break
    return Ended(code, log, _text(folder / "summary.md"), _outputs(folder / "outputs"))


def run_bash(script: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _outputs(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in _text(path).splitlines())


def test_a_run_that_holds_passes_and_writes_summary_and_junit(made: Path, tmp_path: Path) -> None:
    ended = run_action(tmp_path, runs=str(made / "nothing"), baseline=str(made / "baseline.json"))

    assert ended.code == 0, ended.log
    assert ended.outputs == {"exit-code": "0", "junit": "fsdp-inspect.xml"}
    assert ": passes" in ended.summary
    assert "::" not in ended.log
    suite = ElementTree.parse(tmp_path / "fsdp-inspect.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")


def test_a_check_of_runs_executes_no_file_of_the_pull_request(made: Path, tmp_path: Path) -> None:
    for name in ("fsdp_inspect", "json", "shlex", "typer"):
        (tmp_path / f"{name}.py").write_text(
            "open('executed', 'w').write(__name__)\nraise SystemExit(0)"
        )

    ended = run_action(tmp_path, runs=str(made / "leak"), baseline=str(made / "baseline.json"))

    assert ended.code == 1, ended.log
    assert not (tmp_path / "executed").exists()


def test_a_planted_leak_fails_the_job_and_is_annotated(made: Path, tmp_path: Path) -> None:
    ended = run_action(tmp_path, runs=str(made / "leak"), baseline=str(made / "baseline.json"))

    assert ended.code == 1
    assert ended.outputs["exit-code"] == "1"
    assert "::error title=FSDP Inspect::" in ended.log
    assert "activation of layers.3 +64.0 KiB" in ended.log
    assert "cause: unknown. No recorded setting explains most of this increase" in ended.summary
    suite = ElementTree.parse(tmp_path / "fsdp-inspect.xml").getroot()[0]
    assert int(suite.get("failures") or 0) > 0


def test_what_cannot_be_judged_fails_unless_allowed(made: Path, tmp_path: Path) -> None:
    baseline = json.loads((made / "baseline.json").read_text())
    baseline["run"]["versions"]["torch"] = "1.0.0"
    (tmp_path / "other.json").write_text(json.dumps(baseline))
    given = {"runs": str(made / "nothing"), "baseline": str(tmp_path / "other.json")}
    (tmp_path / "allowed").mkdir()

    refused = run_action(tmp_path, **given)
    allowed = run_action(tmp_path / "allowed", **given, allow_unjudged="true")

    assert (refused.code, allowed.code) == (2, 0)
    assert allowed.outputs["exit-code"] == "2"
    assert "::warning title=FSDP Inspect::" in allowed.log
    assert "The baseline has torch 1.0.0" in allowed.log


def test_a_check_without_a_verdict_fails_even_where_unjudged_is_allowed(
    made: Path, tmp_path: Path
) -> None:
    (tmp_path / "fsdp-inspect.xml").write_text("of an earlier step")
    ended = run_action(
        tmp_path, runs=str(made / "nothing"), baseline="missing.json", allow_unjudged="true"
    )

    assert ended.code == 2
    assert "Baseline not found at 'missing.json'" in ended.log
    assert "::error title=FSDP Inspect::The check ended without a verdict" in ended.log


@pytest.mark.slow
def test_a_forecast_of_the_repositorys_own_builder_is_made_and_checked(
    made: Path, tmp_path: Path
) -> None:
    (tmp_path / "my_training.py").write_text(PLANTED.read_text())
    ended = run_action(
        tmp_path,
        forecast="my_training:build --world-size 4 --set 'plant=not resharded'",
        baseline=str(made / "baseline.json"),
    )

    assert ended.code == 1, ended.log
    assert "unsharded parameter of layers.2" in ended.log
    assert not (tmp_path / "forecasts").exists()


def test_a_command_is_run_as_often_as_asked(made: Path, tmp_path: Path) -> None:
    copy = (
        "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2] + '/run'); "
        "open('ran', 'a').write('once ')"
    )
    ended = run_action(
        tmp_path,
        record=f'{sys.executable} -c "{copy}" {made / "nothing"} {{runs}}',
        repeat="2",
        baseline=str(made / "baseline.json"),
    )

    assert ended.code == 0, ended.log
    assert (tmp_path / "ran").read_text() == "once once "


HOSTILE = "$(touch pwned) `touch pwned`; touch pwned #\" ' || touch pwned\n::error::no"


@pytest.mark.parametrize(
    "name",
    mark_slow(["runs", "forecast", "record", "baseline", "budget", "junit"], but=["record"]),
)
def test_no_input_is_ever_run_by_a_shell(made: Path, tmp_path: Path, name: str) -> None:
    given = {"runs": str(made / "nothing"), "baseline": str(made / "baseline.json")}
    if name in ("forecast", "record"):
        del given["runs"]

    ended = run_action(tmp_path, **{**given, name: HOSTILE})

    assert ended.code == 2, ended.log
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("given", [{}, {"runs": "one", "forecast": "--preset tiny"}])
def test_one_thing_to_check_has_to_be_given(tmp_path: Path, given: dict[str, str]) -> None:
    ended = run_action(tmp_path, **given)

    assert ended.code == 2
    assert f"{len(given)} of the inputs forecast, record and runs are given" in ended.log


def test_no_script_contains_an_expression_and_no_other_action_is_used() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text())

    for step in action["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert "uses" not in step
    assert "secrets" not in (ACTION / "action.yml").read_text()
    assert os.access(ACTION / "check.sh", os.X_OK)


def test_actions_from_outside_are_pinned_by_commit_in_our_workflow() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]

    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) for name in used)
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert re.search(r"^make .*\bgate\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def yaml_of_the_docs(key: str) -> Any:
    """The YAML block of docs/gate.md that begins with a key."""
    page = (ROOT / "docs" / "gate.md").read_text()
    (block,) = re.findall(rf"```yaml\n({key}.*?)```", page, flags=re.DOTALL)
    return yaml.safe_load(block)


def test_the_step_in_the_docs_gives_inputs_that_the_action_has() -> None:
    (step,) = yaml_of_the_docs(r"- uses: [^\n]*fsdp-check")
    action = yaml.safe_load((ACTION / "action.yml").read_text())

    assert "/.github/actions/fsdp-check@" in step["uses"]
    assert set(step["with"]) <= set(action["inputs"])


@pytest.mark.slow
def test_the_gitlab_job_of_the_docs_fails_on_a_regression_and_reports(
    tmp_path: Path,
) -> None:
    job = yaml_of_the_docs("memory:")["memory"]
    forecast, check = job["script"]
    training = PLANTED.read_text()
    (tmp_path / "my_training.py").write_text(training)
    wrote, log = run_bash(f"{forecast}\n{check} --update", tmp_path, {})
    assert wrote == 0, log
    subprocess.run(["rm", "-r", str(tmp_path / "forecasts")], check=True)
    (tmp_path / "my_training.py").write_text(training.replace('"nothing"', '"optimizer state"'))

    code, log = run_bash("\n".join(job["script"]), tmp_path, {})

    report = tmp_path / job["artifacts"]["reports"]["junit"]
    assert code == 1, log
    assert "optimizer state" in ElementTree.parse(report).getroot().find(".//failure").text
    assert job["artifacts"]["when"] == "always"
