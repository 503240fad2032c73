"""The collectives of an expert that few steps use are counted, not rounded to none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_inspect
from tests.conftest import Torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("expert_script.py")
TIMED_STEPS = 12
"""14 steps, without 2 warm-up steps."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Path:
    folder = tmp_path_factory.mktemp("expert")
    run_ranks(SCRIPT, cwd=folder)
    return folder / "run"


def printed(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect", *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout


def test_counts_are_means_over_all_timed_steps(recorded: Path) -> None:
    units = {unit.fqn: unit for unit in fsdp_inspect.open_run(recorded).units().units}
    assert units["often"].all_gather.count_per_step == 2
    assert units["often"].reduce_scatter.count_per_step == 1
    assert units["rarely"].all_gather.count_per_step == pytest.approx(2 * 4 / TIMED_STEPS)
    assert units["rarely"].reduce_scatter.count_per_step == pytest.approx(4 / TIMED_STEPS)
    assert units["rarely"].all_gather.bytes


def test_the_commands_show_them_with_decimals(recorded: Path) -> None:
    text = printed("units", recorded)
    rows = [line.split() for line in text.splitlines() if line.startswith("rarely")]
    assert [row[:3] for row in rows[:2]] == [
        ["rarely", "all-gather", "0.67"],
        ["rarely", "reduce-scatter", "0.33"],
    ]
    assert "mean over all timed steps" in " ".join(text.split())
    owners = json.loads(printed("exposed", recorded, "--json"))["exposed"]["owners"]
    counts = [each["count_per_step"] for each in owners if each["fqn"] == "rarely"]
    assert counts == pytest.approx([4 / TIMED_STEPS] * len(counts))
    assert counts
