"""`offline.sh` runs with the packages of a machine without a network, and merges its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.figures import Figure
from tests.benchmarks.machine import describe_machine
from tests.gpu.merge import FIGURES, MOST_FILES, merge
from tests.gpu.outcome import Row, Verdict, shown
from tests.gpu.table import table_json

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "offline.sh"
WHEELS = (HERE / "wheels.txt").read_text().split()
ON_THE_MACHINE = (
    *("torch", "transformers", "accelerate", "lightning", "peft", "pytest", "hypothesis"),
    *("pyarrow", "scipy", "typer", "rich", "psutil", "nvidia-ml-py"),
)
"""The distributions that were installed on the GPU machine in September 2026."""
_IMPORTS = """
import importlib.metadata as metadata, re, sys

def requirements(names):
    found, left = set(), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needed = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        left += [re.match(r"[\\w.-]+", each)[0] for each in needed if "extra ==" not in each]
    return found

allowed = requirements(sys.argv[1].split(",")) | set(sys.argv[2].split(","))
owners = metadata.packages_distributions()

class Missing:
    def find_spec(self, name, path=None, target=None):
        owner = owners.get(name.partition(".")[0])
        normal = {re.sub(r"[-_.]+", "-", each).lower() for each in owner or ()}
        if owner and not normal & allowed and "fsdp-inspect" not in normal:
            raise ModuleNotFoundError(f"{name} of {owner} is not on the machine", name=name)

sys.meta_path.insert(0, Missing())
import tests.gpu.__main__, tests.gpu.emulated, tests.gpu.merge, tests.gpu.sample
import tests.gpu.paths, tests.gpu.overhead, tests.gpu.timing, tests.gpu.two_ranks
import instrumented_trainer.__main__, fsdp_inspect.cli.application, fsdp_inspect.report.text
"""


def test_the_script_imports_with_the_machine_s_packages_and_the_wheels() -> None:
    wheels = ",".join(name.replace("_", "-").lower() for name in WHEELS)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, ",".join(ON_THE_MACHINE), wheels],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_each_wheel_of_the_list_is_pinned_and_needed_in_the_readme() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines}
    assert {name.lower().replace("_", "-") for name in WHEELS} <= {
        name.replace("_", "-") for name in pinned
    }
    assert "tests/gpu/wheels.txt" in (HERE / "README.md").read_text()


@pytest.mark.parametrize("arguments", [[], ["soon"], ["-5"]])
def test_a_call_without_a_budget_explains_itself(arguments: list[str], tmp_path: Path) -> None:
    done = call(arguments, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: OUT=DIR tests/gpu/offline.sh BUDGET_S")


def test_an_unknown_part_fails_and_names_it(tmp_path: Path) -> None:
    done = call(["30", "everything"], tmp_path)
    assert done.returncode == 1
    assert "unknown part everything" in (tmp_path / "out/report.txt").read_text()


def test_a_part_without_time_is_not_started(tmp_path: Path) -> None:
    done = call(["0", "smoke"], tmp_path)
    assert done.returncode == 1
    assert "smoke: not started" in (tmp_path / "out/report.txt").read_text()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_two_calls_on_a_cpu_merge_their_results(tmp_path: Path) -> None:
    first = call(["300", "smoke", "clock"], tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    second = call(["300", "costs"], tmp_path)
    assert second.returncode == 0, second.stdout + second.stderr
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    assert {"report.txt", "figures.json", "figures.md", "steps.log", "smoke.tar.gz"} <= names
    assert len(names) <= MOST_FILES
    rows = [figure["name"] for figure in json.loads((out / FIGURES).read_text())["figures"]]
    assert any("clock" in name for name in rows)
    assert any("cost of" in name for name in rows)
    assert "costs: ok" in (out / "report.txt").read_text()


def call(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script on a CPU at a small size, with this interpreter."""
    settings = {"DEVICE": "cpu", "QUICK": "1", "PY": sys.executable}
    places = {"OUT": str(folder / "out"), "KEPT": str(folder / "kept")}
    return subprocess.run(
        [SCRIPT, *arguments], cwd=ROOT, env={**os.environ, **settings, **places},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


# --- merging


def write(folder: Path, rows: list[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIGURES).write_text(json.dumps(table_json(describe_machine(), rows)))
    time.sleep(0.01)  # the order of parts is that of their files


def row(name: str, value: str) -> Row:
    return shown(Figure(name=name, value=value, how="counted", numbers={"n": 1.0}))


def test_rows_of_a_later_part_replace_those_of_the_same_name(tmp_path: Path) -> None:
    write(tmp_path / "first/core", [row("a", "1"), row("b", "1")])
    write(tmp_path / "first/costs", [row("c", "1")])
    write(tmp_path / "second", [Row(row("b", "2").figure, Verdict.MISSED)])
    merge([tmp_path / "first", tmp_path / "second"], tmp_path / "out")
    merged = json.loads((tmp_path / "out" / FIGURES).read_text())["figures"]
    assert [(each["name"], each["value"], each["verdict"]) for each in merged] == [
        ("a", "1", None),
        ("b", "2", "MISSED"),
        ("c", "1", None),
    ]
    assert "| b " in (tmp_path / "out/figures.md").read_text()


def test_a_table_that_is_being_written_and_a_large_archive_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "parts/core", [row("a", "1")])
    (tmp_path / "parts/costs").mkdir()
    (tmp_path / "parts/costs" / FIGURES).write_text('{"machine": {')
    with (tmp_path / "parts/core/sample.tar.gz").open("wb") as file:
        file.truncate(16 << 20)
    (tmp_path / "parts/core/smoke.tar.gz").write_bytes(b"packed")
    merge([tmp_path / "parts"], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "figures.json", "figures.md", "smoke.tar.gz",
    ]  # fmt: skip
