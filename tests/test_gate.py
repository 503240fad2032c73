"""`.ci/gate` exits with the worst of its verdicts, and its baselines are complete.

The forecasts and the run take minutes; `make gate` runs them. Here a stand-in for the interpreter
logs its arguments and returns planned results.
"""

import os
import subprocess
from pathlib import Path

import pytest

from fsdp_inspect.comparison.gate.baseline import read_baseline

ROOT = Path(__file__).parents[1]
BASELINES = sorted((ROOT / ".ci" / "baselines").glob("*.json"))

# `plan memory` ends with $FORECAST; the n-th `check` with the n-th word of $CHECKS, then with 0.
ANSWERING = """#!/bin/bash
echo "$*" >> "$ASKED"
[ "$3" = plan ] && exit "${FORECAST:-0}"
number=$(grep -c "^-m fsdp_inspect check" "$ASKED")
codes=($CHECKS)
exit "${codes[$((number - 1))]:-0}"
"""


def run_gate(folder: Path, *arguments: str, **answers: str) -> tuple[int, list[str], str]:
    """Run the gate; returns its exit code, its calls of the interpreter, and its errors."""
    interpreter = folder / "python"
    interpreter.write_text(ANSWERING)
    interpreter.chmod(0o755)
    asked = folder / "asked"
    environment = {
        name: value for name, value in os.environ.items() if name != "GITHUB_STEP_SUMMARY"
    }
    done = subprocess.run(
        [ROOT / ".ci" / "gate", *arguments],
        cwd=folder,
        env={**environment, "PYTHON": str(interpreter), "ASKED": str(asked), **answers},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = asked.read_text().splitlines() if asked.exists() else []
    return done.returncode, lines, done.stderr


def test_each_model_is_forecast_once_and_each_baseline_is_checked(tmp_path: Path) -> None:
    code, asked, _ = run_gate(tmp_path)

    forecasts = [line for line in asked if line.startswith("-m fsdp_inspect plan memory")]
    checks = [line for line in asked if line.startswith("-m fsdp_inspect check")]
    assert code == 0
    assert len(forecasts) == 3
    assert all("--world-size 8,64" in line for line in forecasts)
    assert len(checks) == len(BASELINES) == 7
    assert all(any(str(path) in line for line in checks) for path in BASELINES)
    assert not any("--update" in line for line in asked)


@pytest.mark.parametrize(
    ("checks", "code"),
    [("0 0 0", 0), ("2 0 0", 2), ("2 1 0", 1), ("0 1 2", 1), ("0 0 0 0 0 0 1", 1)],
)
def test_a_regression_is_worse_than_what_cannot_be_judged(
    tmp_path: Path, checks: str, code: int
) -> None:
    ended, asked, _ = run_gate(tmp_path, CHECKS=checks)

    assert ended == code
    assert len(asked) == 10  # the rest is checked after any failure


def test_a_forecast_that_cannot_be_made_is_no_pass(tmp_path: Path) -> None:
    assert run_gate(tmp_path, FORECAST="1")[0] == 2


def test_an_update_writes_each_baseline_anew(tmp_path: Path) -> None:
    _, asked, _ = run_gate(tmp_path, "--update")

    assert sum("--update" in line for line in asked) == 7


def test_another_argument_is_refused(tmp_path: Path) -> None:
    code, asked, complaint = run_gate(tmp_path, "--upate")

    assert (code, asked) == (2, [])
    assert "Invalid argument '--upate'" in complaint


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_a_committed_baseline_is_short_and_names_no_machine(path: Path) -> None:
    text = path.read_text()
    baseline = read_baseline(path)

    assert len(text.splitlines()) < 400
    assert baseline.run["device_name"] == ""
    assert baseline.times == {}
    assert not any(word in text for word in ("/tmp", "/home", "runs_dir", "+cpu", "+cu"))
    assert f"-{baseline.manifest.world_size}-ranks" in path.stem
    assert baseline.manifest.source == ("recorded" if "recorded" in path.stem else "predicted")
