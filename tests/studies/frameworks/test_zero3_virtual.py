"""DeepSpeed's installed engine does what the stored steps of it did, in virtual time."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make frameworks installs it.")
STORED = Path(__file__).parents[2] / "simulation" / "zero3_engine.json.gz"


def truths(path: Path) -> list[tuple[str, Any]]:
    found = json.loads(gzip.decompress(path.read_bytes()))
    return [(one["name"], one["truths"]) for one in found]


def test_the_engine_repeats_the_stored_steps(tmp_path: Path) -> None:
    written = tmp_path / "engine.json.gz"
    command = [sys.executable, "-m", "tests.studies.frameworks.zero3_virtual", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert truths(written) == truths(STORED)
