"""The launcher distinguishes forwards without gradients of each step from evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.tables import SummaryTable
from tests.conftest import Torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EVERY = 4
"""Steps between evaluations."""
SCRIPT = Path(__file__).with_name("reference_script.py")


@pytest.fixture(scope="module")
def run(torchrun: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("reference")
    torchrun("-m", "fsdp_inspect.record", "--no-verdict", "--out", "runs", SCRIPT, cwd=folder)
    (path,) = (folder / "runs").iterdir()
    return open_run(path)


def forwards(run: Run, part: str, step: int) -> list[str]:
    """The phases of the forwards of units whose name contains `part`, in one step of rank 0."""
    units = [unit.index for unit in run.source.manifest.units if part in unit.fqn]
    assert units
    events = run.source.events(0, steps=[step])
    own = events.where((events.kind == EventKind.FORWARD) & np.isin(events.unit, units))
    return [Phase(code).label for code in own.phase.tolist()]


def test_a_teacher_is_part_of_each_step(run: Run) -> None:
    for step in (2, 3, 5, 6, 7):
        assert forwards(run, "sequential.", step) == ["forward", "forward"]


def test_a_frozen_tower_inside_a_training_forward_is_part_of_the_step(run: Run) -> None:
    assert forwards(run, "tower", 3) == ["forward", "forward"]


def test_an_evaluation_after_every_fourth_step_is_none_of_the_step(run: Run) -> None:
    evaluated = forwards(run, "student.layers", EVERY)
    assert evaluated == ["evaluation", "evaluation", "forward", "forward"]


def test_the_run_follows_its_plan_though_a_head_has_no_gradient(run: Run) -> None:
    check = run.summary().plan_check
    assert check.is_consistent, check.sentence
    [remark] = [each for each in check.findings if each.is_normal]
    assert "has parameters without a gradient" in remark.sentence


class WithTypicalSteps:
    """The same run, as if the given steps and some later ones were typical in time."""

    def __init__(self, run: Run, steps: tuple[int, ...]) -> None:
        self._source = run.source
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def summary(self, **chosen: Any) -> SummaryTable:
        rows = self._source.summary(**chosen)
        # The given steps take 100 ms, half of the others less and half of them more.
        sign = rows.step.astype(np.int64) % 2 * 2 - 1
        others = 100_000_000 + sign * (20 - rows.step) * 1_000_000
        times = np.where(np.isin(rows.step, self._steps), 100_000_000, others)
        is_step = rows.kind == EventKind.STEP
        return replace(rows, duration_ns=np.where(is_step, times, rows.duration_ns))


@pytest.mark.parametrize("typical", [(), (EVERY, 2 * EVERY)], ids=["as recorded", "evaluated"])
def test_the_simulated_step_gathers_the_teacher_whichever_steps_are_typical(
    run: Run, typical: tuple[int, ...]
) -> None:
    source: Any = WithTypicalSteps(run, typical) if typical else run.source
    member = timed_rank(source, 0)
    assert member is not None
    assert set(typical) <= set(member.typical_steps.tolist())
    work = measure_work(source, rank=0)
    assert not set(work.steps) & {EVERY, 2 * EVERY}
    teacher = [at for at, unit in enumerate(work.units) if "sequential." in unit.fqn]
    gathered = [span.unit for span in work.simulate().spans if span.kind is EventKind.ALL_GATHER]
    assert len(teacher) == 2
    assert [gathered.count(unit) for unit in teacher] == [1, 1]
