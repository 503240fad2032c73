"""Planted causes of slow compute on two ranks: kernels of profiled steps, lines, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fsdp_inspect
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.report.kernels_wording import render_kernels
from tests.conftest import Torchrun
from tests.distributed.compute_script import CASES
from tests.report.terminal_text import text_of

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compute")
    run_ranks("-m", "tests.distributed.compute_script", folder, *CASES)
    return folder


def seen(folder: Path, case: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / case / f"seen{rank}.json").read_text())


def opened(folder: Path, case: str) -> fsdp_inspect.Run:
    return fsdp_inspect.open_run(folder / case / "run")


@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
def test_losses_are_bit_identical(folder: Path, case: str) -> None:
    for rank in range(2):
        assert seen(folder, case, rank)["losses"] == seen(folder, "plain", rank)["losses"]


def test_profiled_steps_show_operators_by_unit_and_are_not_timed(folder: Path) -> None:
    run = opened(folder, "profiled")
    found = run.kernels()
    assert found.steps == (6, 7)
    assert not found.on_device
    assert not {6, 7} & set(select_steps(run.source).timed)
    assert 0 < found.compute_ns < found.step_ns
    by_unit = {(cost.fqn, cost.phase, cost.kind) for cost in found.groups}
    for unit in ("0", "1", "2"):
        for phase in ("forward", "backward"):
            assert (unit, phase, "matrix product") in by_unit
    (products,) = (cost for cost in found.kinds if cost.kind == "matrix product")
    assert products.flops == 3 * 6 * 2 * 16 * 64 * 256
    assert "kernels" not in [note for note in run.notes if "damaged" in note]
    assert "matrix product" in text_of(render_kernels(found))


def test_the_window_states_its_own_cost(folder: Path) -> None:
    problems = opened(folder, "profiled").ranks_recorded[0].problems
    (cost,) = (each for each in problems if "The profile of steps 6 to 7" in each)
    assert "outside of all timed steps" in cost


@pytest.mark.parametrize(
    ("case", "reason"),
    [("other_profiler", "the script started a profiler"), ("failing", "the disk is full")],
)
def test_a_window_that_fails_ends_alone(folder: Path, case: str, reason: str) -> None:
    run = opened(folder, case)
    assert any(reason in each for each in run.ranks_recorded[0].problems)
    assert len(select_steps(run.source).finished) == 14
