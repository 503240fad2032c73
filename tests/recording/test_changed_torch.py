"""A torch that has renamed or changed a private name costs the units, and not the training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect import Recorder, open_run
from fsdp_inspect.analysis.breakdown import StepPart
from fsdp_inspect.disabled_recorder import DisabledRecorder
from fsdp_inspect.trace.sharders import NO_UNITS
from tests.cases import mark_slow

from .changed_torch import CHANGES

STEPS = 4
SCRIPT = Path(__file__).with_name("changed_torch.py")
HARMLESS = {"fsdp2 method has an argument"}
"""Changes that cost nothing: wraps pass on what they do not know."""
GUARD = ("fsdp2 attribute is renamed",)
ON_TWO_RANKS = {"fsdp2 method is renamed", "fsdp1 method is renamed", "ddp reducer is renamed"}


@pytest.mark.parametrize("change", mark_slow(CHANGES, but=GUARD))
def test_the_units_are_lost_and_neither_the_training_nor_the_rest_of_the_recording(
    change: str, tmp_path: Path
) -> None:
    run, world = tmp_path / "run", 1 + (change in ON_TWO_RANKS)
    processes = [
        subprocess.Popen(
            [*command(change, record, run), str(rank), str(world)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for record in ("no", "yes")
        for rank in range(world)
    ]  # fmt: skip
    ended = [process.communicate(timeout=300) for process in processes]
    plain, recorded = ended[0], ended[world]
    assert [process.returncode for process in processes] == [0] * len(processes), recorded[1]
    assert recorded[0] == plain[0]
    assert recorded[0].count("0x") == STEPS
    assert "fsdp_inspect: " not in plain[1]
    is_lost = change not in HARMLESS
    assert sum(text.count("fsdp_inspect: ") for _, text in ended[world:]) == is_lost, recorded[1]
    check_recording(run, world, change.partition(" ")[0], is_lost=is_lost)


def command(change: str, record: str, run: Path) -> list[str]:
    return [sys.executable, "-W", "always", str(SCRIPT), change, record, str(run)]


def check_recording(path: Path, world: int, sharder: str, *, is_lost: bool) -> None:
    run = open_run(path)
    found, units = run.summary(), run.manifest.units
    kept = (NO_UNITS, False) if is_lost else (sharder, True)
    assert (run.manifest.sharder, bool(units)) == kept
    assert found.num_steps == STEPS
    assert found.loss.num_steps == STEPS
    assert found.peak_allocated_bytes > 0
    assert run.diagnose().status == "healthy"
    assert any("are not recorded with torch" in note for note in run.notes) == is_lost
    assert all(
        found.breakdown.duration_ns(part) > 0 for part in (StepPart.FORWARD, StepPart.BACKWARD)
    )
    if world > 1:
        assert found.communication_bytes > 0


def test_the_stand_in_has_every_method_of_the_recorder() -> None:
    stand_in = DisabledRecorder(enabled=False)
    names = [name for name in dir(Recorder) if not name.startswith("_")]
    assert [name for name in names if not hasattr(stand_in, name)] == []
    stand_in.detail(steps=3)
