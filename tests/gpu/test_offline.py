"""`offline.sh`: the packages that it needs, and the whole script on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fsdp_inspect.store.reader import open_run
from tests.gpu.__main__ import STEPS
from tests.gpu.packages import IMAGE, WHEELS, read_names
from tests.gpu.setting import NEEDS_CUDA
from tests.gpu.suites import FILES

ROOT = Path(__file__).parents[2]

IMPORTS = '''
import sys, json, importlib
blocked = set(json.loads(sys.argv[1]))

class Installed:
    """Finds the modules that the GPU machine has, too."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in blocked:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Installed(finder) for finder in sys.meta_path]
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
import pytest
sys.exit(pytest.main(json.loads(sys.argv[3])))
'''


def requirements(names: Iterable[str]) -> set[str]:
    """The distributions and all that they require, by canonical name."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # a part of torch that another build has
            continue
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


def modules_that_the_gpu_machine_lacks() -> list[str]:
    """Modules of this environment's packages that are neither in the image nor in the wheels."""
    wheels = {canonicalize_name(name) for name in read_names(WHEELS)}
    present = requirements(read_names(IMAGE)) | wheels
    return [
        module
        for module, packages in metadata.packages_distributions().items()
        if not present & {canonicalize_name(package) for package in packages}
        and module not in ("fsdp_inspect", "fsdp_inspect_app", "instrumented_trainer")
    ]


@pytest.mark.slow
def test_the_script_imports_with_the_packages_of_the_gpu_machine_and_the_wheels() -> None:
    lacking = modules_that_the_gpu_machine_lacks()
    assert {"duckdb", "streamlit"} <= set(lacking)
    steps = [f"tests.gpu.{name}" for name in STEPS if name not in FILES]
    parts = [f"fsdp_inspect.cli.{name}" for name in ("application", "sections", "diagnose")]
    modules = [
        "tests.gpu.__main__",
        "tests.gpu.step",
        *steps,
        *parts,
        "instrumented_trainer.command_line",
    ]
    tests = [f"tests/gpu/{file}" for files in FILES.values() for file in files]
    collecting = ["--collect-only", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            IMPORTS,
            *map(json.dumps, (lacking, modules, [*collecting, *tests])),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_wheel_is_pinned_and_complete() -> None:
    wheels = read_names(WHEELS)
    pinned = (ROOT / "constraints.txt").read_text().lower()
    assert [name for name in wheels if f"\n{name.lower()}==" not in pinned] == []
    assert requirements(wheels) <= requirements(read_names(IMAGE)) | set(
        map(canonicalize_name, wheels)
    )


def offline(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The wheels of this checkout, if it has any, are for another version of Python.
    setting = {"DEVICE": "cpu", "QUICK": "1", "PY": sys.executable, "WHEELS": "no-wheels"}
    return subprocess.run(
        ["bash", "tests/gpu/offline.sh", *arguments],
        cwd=ROOT,
        env={**os.environ, **setting, "OUT": str(out)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def figures_in(out: Path) -> list[dict[str, str]]:
    figures: list[dict[str, str]] = json.loads((out / "figures.json").read_text())["figures"]
    return figures


@pytest.mark.slow
def test_a_second_call_adds_its_steps_to_the_results_of_the_first(tmp_path: Path) -> None:
    assert offline(tmp_path, "100", "costs").returncode == 0
    done = offline(tmp_path, "12", "clock")
    assert done.returncode == 1
    assert [figure["step"] for figure in figures_in(tmp_path)] == ["costs", "costs", "clock"]
    assert figures_in(tmp_path)[-1]["verdict"] == "not started"
    report = (tmp_path / "report.txt").read_text()
    assert report.count("=== offline.sh") == 2
    assert re.search(r"^Python 3\.\d+\.\d+, fsspec ", report, re.MULTILINE)


def test_an_unknown_step_is_an_error(tmp_path: Path) -> None:
    done = offline(tmp_path, "60", "nonsense")
    assert done.returncode == 2
    assert "invalid choice: 'nonsense'" in done.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_the_whole_script_runs_on_a_cpu(tmp_path: Path) -> None:
    done = offline(tmp_path, "1100")
    assert done.returncode == 0, done.stdout
    figures = figures_in(tmp_path)
    assert list(dict.fromkeys(figure["step"] for figure in figures)) == list(STEPS)
    verdicts = Counter(figure["verdict"] for figure in figures)
    assert verdicts["MISSED"] == 0
    assert len(figures) > 30
    reasons = {f["how"] for f in figures if f["verdict"] == "not available"}
    assert all(NEEDS_CUDA in reason or "which torch" in reason for reason in reasons)
    assert "| how |" in (tmp_path / "figures.md").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert max(path.stat().st_size for path in files) < 16 << 20
    with tarfile.open(tmp_path / "emulated-8-ranks-cpu.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    sample = tmp_path / "emulated-8-ranks-cpu"
    assert "The same call of `make gpu` had measured before" in (sample / "README.md").read_text()
    assert open_run(sample).manifest.source == "emulated"
    assert json.loads((sample / "expected.json").read_text())["world_size"] == 8
    assert sum(path.stat().st_size for path in sample.rglob("*") if path.is_file()) < 1 << 20
