"""Make an environment for HTA outside the project's environment.

HTA needs a pandas older than 3, which this project does not use. `make bench ARGS="--only imports"`
creates the environment under build/ in a minute, from the network. Tests use it if it exists.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "hta-venv"
PYTHON = FOLDER / "bin" / "python"
REQUIREMENTS = ("HolisticTraceAnalysis>=0.5,<1", "pandas<3")

_DRIVER = Path(__file__).with_name("hta_driver.py")
_READY = FOLDER / ".complete"


def find_hta() -> Path | None:
    """The interpreter of HTA's environment; None if the environment is missing."""
    return PYTHON if _READY.exists() else None


def make_hta() -> Path:
    """Make HTA's environment if it is missing; returns its interpreter.

    Raises:
        RuntimeError: HTA cannot be installed. The message has the end of pip's output.
    """
    if not _READY.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
        _run([str(PYTHON), "-m", "pip", "install", "--quiet", *REQUIREMENTS])
        _READY.touch()
    return PYTHON


def ask_hta(python: Path, trace: Path) -> dict[str, Any]:
    """HTA's results for a trace, with kernels to the nanosecond, and their cost."""
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"}
    answer = _run([str(python), str(_DRIVER), str(trace)], environment)
    return dict(json.loads(answer.splitlines()[-1]))


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=1800
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
