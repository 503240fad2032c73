"""Record and test with several versions of torch: `make torch-matrix`, or

    python -m tests.studies.torch_matrix [VERSION ...] [--folder FOLDER] [--page PAGE] [--discard]

A version is `2.11.0`, or `newest`: the newest release that the registry has. `--discard` removes
each environment after its use, for machines with a small disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.studies.torch_matrix.page import read_version, render

ROOT = Path(__file__).parents[3]
VERSIONS = ("2.9.1", "2.11.0", "2.13.0", "newest")
TESTED = ("tests/recording", "tests/emulation/forecast")
_FACTS = """
import json, os, platform, torch
print(json.dumps({
    "torch": torch.__version__.split("+")[0],
    "build": "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}",
    "python": platform.python_version(),
    "machine": f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores",
}))
"""


def main() -> int:
    """Measure each version, write the page, and return 1 if a version is not green."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.torch_matrix", description=__doc__
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/torch-matrix")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/versions.md")
    parser.add_argument("--discard", action="store_true")
    given = parser.parse_args()
    named = [find_newest() if each == "newest" else each for each in given.versions]
    results = []
    for version in dict.fromkeys(named):
        folder = given.folder / version
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
        folder.mkdir(parents=True)
        measure(install(version, folder), folder)
        results.append(read_version(folder))
        state = "green" if results[-1].is_green else "not green: see the page"
        print(f"torch {version}: {state}", flush=True)
        if given.discard:
            shutil.rmtree(environment_of(version))
    given.page.write_text(render(results))
    print(f"Written: {given.page}")
    return int(not all(each.is_green for each in results))


def find_newest() -> str:
    """The newest release of torch that the registry has."""
    command = ["install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--report=-"]
    found = subprocess.run(
        [sys.executable, "-m", "pip", *command, "torch"],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PIP_CONSTRAINT": os.devnull},
    )
    report = json.loads(found.stdout)
    return str(report["install"][0]["metadata"]["version"]).split("+")[0]


def environment_of(version: str) -> Path:
    """The folder of a version's virtual environment."""
    return ROOT / ".venv-torch" / version


def install(version: str, folder: Path) -> Path:
    """Create the environment of a version, unless it is complete; returns its interpreter.

    torch brings what it requires, and `constraints.txt` pins the rest.
    """
    environment = environment_of(version)
    python, complete = environment / "bin/python", environment / ".complete"
    if complete.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)

    def pip(*arguments: str | Path, pins: str = os.devnull) -> str:
        done = subprocess.run(
            [python, "-m", "pip", *arguments], check=True, cwd=ROOT, stdout=subprocess.PIPE,
            env={**os.environ, "PIP_CONSTRAINT": pins}, text=True,
        )  # fmt: skip
        return done.stdout

    pip("install", "--quiet", f"torch=={version}")
    brought = {line.partition("==")[0].lower() for line in pip("freeze", "--all").splitlines()}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.partition("==")[0].lower() not in brought]
    pins = folder / "constraints.txt"
    pins.write_text("\n".join([*kept, f"torch=={version}"]) + "\n")
    pip("install", "--quiet", "-e", ".[torch-matrix]", pins=str(pins))
    complete.touch()
    return python


def measure(python: Path, folder: Path) -> None:
    """Run the set-ups and the tests with one interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}

    def run(*arguments: str | Path, check: bool = True) -> str:
        done = subprocess.run(
            [python, *arguments], cwd=ROOT, env=environment, check=check, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        return done.stdout

    (folder / "facts.json").write_text(run("-c", _FACTS))
    run("-m", "tests.studies.torch_matrix.measure", folder)
    report = f"--junitxml={folder / 'tests.xml'}"
    options = ("-q", "-n", "2", "-p", "tests.studies.torch_matrix.cpu_build", report)
    output = run("-m", "pytest", *options, *TESTED, check=False)
    (folder / "tests.log").write_text(output)


if __name__ == "__main__":
    sys.exit(main())
