"""A DeepSpeed that has renamed or changed a name costs the units, and not the training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.trace.sharders import NO_UNITS

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make frameworks installs it.")
WORLD, STEPS = 2, 4
COMMAND = (sys.executable, "-W", "always", "-m", "tests.studies.frameworks.changed_deepspeed")
HARMLESS = {"zero3 method has an argument"}
ROOT = Path(__file__).parents[3]
CHANGES = (
    *("zero3 method is renamed", "zero3 method has an argument", "zero3 attribute is renamed"),
    *("zero3 coordinator is renamed", "zero2 method is renamed", "zero1 attribute is renamed"),
)


@pytest.mark.parametrize("change", CHANGES)
def test_the_units_are_lost_and_neither_the_training_nor_the_rest_of_the_recording(
    change: str, tmp_path: Path
) -> None:
    run, losses = tmp_path / "run", []
    for record in ("no", "yes"):
        processes = [
            subprocess.Popen(
                [*COMMAND, change, record, str(run), str(rank), str(WORLD)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                env={**os.environ, "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        ended = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0] * WORLD, ended[0][1][-3000:]
        losses.append([line for line in ended[0][0].splitlines() if line.startswith("loss ")])
        said = sum(text.count("fsdp_inspect: ") for _, text in ended)
        assert said == (record == "yes" and change not in HARMLESS)
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    found = open_run(run)
    assert (found.manifest.sharder == NO_UNITS) == (change not in HARMLESS)
    summary = found.summary()
    assert summary.num_steps == STEPS
    assert summary.communication_bytes > 0
