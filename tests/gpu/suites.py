"""Run tests that need a GPU as steps of the script: one row for each suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

from tests.gpu.outcome import Row, unavailable
from tests.gpu.sample import ROOT
from tests.gpu.setting import NEEDS_CUDA, Setting
from tests.studies.benchmarks.figures import Figure

FILES = {
    "core_tests": ("test_recorder_gpu.py", "test_emulation_gpu.py", "test_snapshot_gpu.py"),
    "trainer_tests": ("test_trainer_gpu.py",),
}
"""By step. The step `paths` runs the paths of `test_paths_gpu.py`."""
_OPTIONS = (
    *("-m", "gpu", "-rA", "--tb=short", "--timeout=120"),
    # The machine's image has plugins of its own, and a newer package may warn.
    *("-p", "pytest_timeout", "-p", "no:cacheprovider", "-o", "filterwarnings=default"),
)


def measure_of(name: str) -> Callable[[Setting], Iterator[Row]]:
    """The function that measures a suite."""
    return partial(_measure, name)


def _measure(name: str, setting: Setting) -> Iterator[Row]:
    files = [f"tests/gpu/{file}" for file in FILES[name]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *_OPTIONS, *files],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    counts = count_outcomes(done.stdout)
    title = name.replace("_", " ")
    if done.returncode == 0 and not counts.get("passed") and not setting.is_cuda:
        yield unavailable(title, NEEDS_CUDA)
        return
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    yield setting.judge.exact(
        Figure(
            name=title,
            value=", ".join(f"{number} {what}" for what, number in counts.items()) or "none ran",
            aim="all pass",
            how=f"Run: {' '.join(files)}. Failed: {', '.join(failed) or 'none'}.",
            numbers={what: float(number) for what, number in counts.items()},
        ),
        holds=done.returncode == 0 and counts.get("passed", 0) > 0,
    )


def count_outcomes(output: str) -> dict[str, int]:
    """The numbers in the last line of pytest's output, by outcome."""
    last = output.strip().rpartition("\n")[2]
    found = re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected)", last)
    return {what.rstrip("s") if what == "errors" else what: int(number) for number, what in found}
