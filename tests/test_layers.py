"""Imports go down only, and `make check` reports a violation.

Each violation is a new module in a copy of the packages.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKED = ("pyproject.toml", "fsdp_inspect", "app", "instrumented_trainer")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    sources = os.pathsep.join([str(folder), str(folder / "app")])
    return subprocess.run(
        [program, "--no-logo", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": sources, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def copy_of_the_code(tmp_path: Path) -> Path:
    for name in CHECKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_every_import_goes_down_the_layers() -> None:
    checked = lint_imports(ROOT)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert " 0 broken." in checked.stdout


@pytest.mark.parametrize(
    ("package", "statement", "contract"),
    [
        pytest.param(
            "fsdp_inspect/trace",
            "import fsdp_inspect.report",
            "One direction: a layer imports only layers below it",
            id="the data model imports a presenter",
        ),
        pytest.param(
            "fsdp_inspect/analysis",
            "import fsdp_inspect.recording",
            "Analysis and recording meet in the run folder, never in code",
            id="an analysis imports the recorder",
        ),
        pytest.param(
            "fsdp_inspect/store",
            "def hide() -> None:\n    import torch",
            "Only code beside a model imports torch: traces open on a laptop without it",
            id="the store imports torch, inside a function",
        ),
        pytest.param(
            "fsdp_inspect/recording",
            "import instrumented_trainer",
            "The library knows neither the app nor the trainer",
            id="the recorder imports the trainer",
        ),
        pytest.param(
            "fsdp_inspect/report",
            "import streamlit",
            "The library knows neither the app nor the trainer",
            id="a presenter imports streamlit",
        ),
        pytest.param(
            "app/fsdp_inspect_app",
            "import torch",
            "Only code beside a model imports torch: traces open on a laptop without it",
            id="the app imports torch",
        ),
        pytest.param(
            "fsdp_inspect/analysis",
            "import fsdp_inspect.store.reader",
            "Analyses take a run: only lists of runs and live runs open a folder",
            id="an analysis opens run folders",
        ),
    ],
)
def test_an_import_against_the_rules_is_caught_and_named(
    copy_of_the_code: Path, package: str, statement: str, contract: str
) -> None:
    (copy_of_the_code / package / "violation.py").write_text(f"{statement}\n")

    checked = lint_imports(copy_of_the_code)

    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert f"{contract} BROKEN" in checked.stdout
    assert ".violation -> " in checked.stdout


def test_a_cycle_between_packages_is_caught_and_named(copy_of_the_code: Path) -> None:
    package = copy_of_the_code / "fsdp_inspect" / "analysis" / "verdict"  # the summary imports it
    (package / "violation.py").write_text("import fsdp_inspect.analysis.summary\n")

    checked = lint_imports(copy_of_the_code)

    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "No import cycles, between modules or between packages BROKEN" in checked.stdout
    assert ".verdict -> .summary (1 import)" in checked.stdout
