"""`make` sets up a bare machine, or states the remedy.

The set-up takes minutes, and every CI run begins with it. Here its logic is tested with a stand-in
for the interpreter that only logs its arguments.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Replaces python3. It makes a "virtual environment" whose interpreter logs calls of pip. While a
# file `no-network` is next to the Makefile, it fails like pip without a network.
NOTING_PYTHON = """#!/bin/sh
[ "$2" = venv ] || exit 0
echo venv >> asked
mkdir -p .venv/bin
printf '#!/bin/sh\\necho pip >> asked\\n[ ! -e no-network ]\\n' > .venv/bin/python
chmod +x .venv/bin/python
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that set-up reads, and an interpreter that logs."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    interpreter = tmp_path / "noting-python"
    interpreter.write_text(NOTING_PYTHON)
    interpreter.chmod(0o755)
    return tmp_path


def make(
    folder: Path, *arguments: str, python: str = "./noting-python"
) -> subprocess.CompletedProcess[str]:
    # Without the variables that an outer `make test` passes to inner makes.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        ["make", f"PYTHON={python}", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def asked(clone: Path) -> list[str]:
    return (clone / "asked").read_text().split()


def test_make_alone_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: ([\w-]+)$", makefile, flags=re.MULTILINE)

    listed = re.findall(r"^  make ([\w-]+) +\S", make(ROOT).stdout, flags=re.MULTILINE)

    assert listed == targets
    assert {"demo", "test", "test-all", "check", "app", "bench", "gpu"} <= set(listed)


def test_setup_is_made_once(clone: Path) -> None:
    assert make(clone, ".venv/.complete").returncode == 0
    assert make(clone, ".venv/.complete").returncode == 0

    assert asked(clone) == ["venv", "pip"]


def test_interrupted_setup_is_made_anew(clone: Path) -> None:
    (clone / "no-network").touch()
    assert make(clone, ".venv/.complete").returncode == 2
    (clone / "no-network").unlink()

    assert make(clone, ".venv/.complete").returncode == 0

    assert asked(clone) == ["venv", "pip", "venv", "pip"]


@pytest.mark.parametrize("changed", ["constraints.txt", "pyproject.toml"])
def test_setup_is_updated_when_its_sources_change(clone: Path, changed: str) -> None:
    make(clone, ".venv/.complete")
    finished_ns = (clone / ".venv" / ".complete").stat().st_mtime_ns
    os.utime(clone / changed, ns=(finished_ns + 10**9, finished_ns + 10**9))

    make(clone, ".venv/.complete")

    assert asked(clone) == ["venv", "pip", "pip"]


@pytest.mark.parametrize(
    ("script", "advice"),
    [
        pytest.param("echo Python 3.10.4; exit 1", "make PYTHON=python3.12 test", id="too old"),
        pytest.param(
            'case "$2" in *ensurepip*) exit 1;; esac', "apt-get install python3-venv", id="no venv"
        ),
    ],
)
def test_unfit_python_is_refused_with_what_to_do(clone: Path, script: str, advice: str) -> None:
    (clone / "noting-python").write_text(f"#!/bin/sh\n{script}\n")

    refused = make(clone, "test")

    assert refused.returncode == 2
    assert advice in refused.stderr
    assert not (clone / ".venv").exists()


def test_missing_python_is_refused_by_name(clone: Path) -> None:
    refused = make(clone, "test", python="no-such-python")

    assert "'no-such-python' is missing or older than Python 3.11" in refused.stderr
