"""The samples still have the numbers from their recording."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from tests.conftest import Torchrun

SAMPLES = Path(__file__).parents[2] / "samples"
NAMES = sorted(path.parent.name for path in SAMPLES.glob("*/expected.json"))
MAX_BYTES = 1 << 20
NOTES = {
    "emulated-8-ranks-cuda": [
        "Rank 0 reports: NVLink traffic cannot be read on this machine: Not Supported."
    ]
}
"""The notes of a sample; the others have none."""


def expected(name: str) -> dict[str, Any]:
    return json.loads((SAMPLES / name / "expected.json").read_text())


def test_there_is_a_two_rank_run_and_a_hybrid_one() -> None:
    meshes = [open_run(SAMPLES / name).manifest.mesh for name in NAMES]
    assert any(len(mesh) == 1 and mesh for mesh in meshes)
    assert any(sorted(mesh.values()) == [2, 2] for mesh in meshes)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_small_and_says_how_it_was_made(name: str) -> None:
    size = sum(path.stat().st_size for path in (SAMPLES / name).rglob("*") if path.is_file())
    assert size < MAX_BYTES
    assert "torchrun" in (SAMPLES / name / "README.md").read_text()
    assert f"{name}/" in (SAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_opens_complete_and_without_notes(name: str) -> None:
    run = open_run(SAMPLES / name)
    assert run.status is RunStatus.COMPLETE
    assert list(run.notes) == NOTES.get(name, [])


@pytest.mark.parametrize("name", NAMES)
def test_the_summary_of_a_sample_has_its_expected_numbers(name: str, run_python: Torchrun) -> None:
    done = run_python("-m", "fsdp_inspect", "show", SAMPLES / name, "--json")
    summary = json.loads(done.stdout)
    assert {key: summary[key] for key in expected(name)} == expected(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_holds_nothing_of_the_machine_it_was_made_on(name: str) -> None:
    manifest = (SAMPLES / name / "run.json").read_text()
    assert "/root" not in manifest
    assert "/home" not in manifest
    assert "/work" not in manifest
