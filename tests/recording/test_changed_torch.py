"""A torch that has renamed or changed a private name costs the recording, and not the training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import mark_slow

from .changed_torch import CHANGES

SCRIPT = Path(__file__).with_name("changed_torch.py")
HARMLESS = {"fsdp2 method has an argument"}
"""Changes that cost nothing: wraps pass on what they do not know."""
GUARD = ("fsdp2 class is missing", "fsdp2 method is renamed", "fsdp2 method has an argument")


@pytest.mark.parametrize("change", mark_slow(CHANGES, but=GUARD))
def test_the_training_is_unchanged_and_one_sentence_names_the_change(
    change: str, tmp_path: Path
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "always", str(SCRIPT), change, record, str(tmp_path / "run")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for record in ("no", "yes")
    ]  # fmt: skip
    plain, recorded = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], recorded[1][-3000:]
    assert recorded[0] == plain[0]
    assert recorded[0].count("0x") == 4
    said = recorded[1].count("fsdp_inspect: ")
    assert said == (0 if change in HARMLESS else 1), recorded[1]
    assert "fsdp_inspect: " not in plain[1]
