"""Plain steps change nothing but the rows of their own units and collectives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import NO_UNIT, EventKind
from fsdp_inspect.trace.run import RunSource
from tests.cases import mark_slow
from tests.conftest import Torchrun
from tests.distributed.plain_steps_script import EVALUATING, NUM_STEPS, is_detailed

pytestmark = pytest.mark.distributed

ON_TWO_RANKS = ("fsdp2", "fsdp1", "ddp", "simple_fsdp", "compiled_fsdp2")
ON_FOUR_RANKS = ("fsdp_tp", "hsdp", "fsdp_ep", "fsdp_cp", "pipeline")
GUARD = ("fsdp2",)
DETAILED = [step for step in range(NUM_STEPS) if is_detailed(step)]
PARTS = {
    *(EventKind.STEP, EventKind.FORWARD, EventKind.BACKWARD, EventKind.OPTIMIZER),
    *(EventKind.DATA, EventKind.BETWEEN_STEPS),
}
RANDOM = (EventKind.GARBAGE_COLLECTION,)


class Case(NamedTuple):
    """The runs of one case, and what each rank saw."""

    name: str
    whole: RunSource
    alike: RunSource
    apart: RunSource
    seen: list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain_steps")


@pytest.fixture(scope="module")
def done() -> set[str]:
    """The cases that have run."""
    return set()


@pytest.fixture(
    params=mark_slow([*ON_TWO_RANKS, *ON_FOUR_RANKS], but=GUARD), ids=str, scope="module"
)
def case(request: pytest.FixtureRequest, run_ranks: Torchrun, folder: Path, done: set[str]) -> Case:
    name = request.param
    if name not in done:
        group = next(each for each in (GUARD, ON_TWO_RANKS, ON_FOUR_RANKS) if name in each)
        together = [each for each in group if each not in done]
        driver = "tests.distributed.plain_steps_script"
        num_ranks = 4 if name in ON_FOUR_RANKS else 2
        run_ranks("-m", driver, folder, *together, num_ranks=num_ranks)
        done.update(together)
    paths = sorted((folder / name).glob("seen*.json"))
    runs = (open_run(folder / name / each) for each in ("whole", "alike", "apart"))
    return Case(name, *runs, [json.loads(path.read_text()) for path in paths])


def _rows(run: RunSource, rank: int) -> dict[int, Counter[tuple[int, ...]]]:
    """What each step's rows state, but for their times."""
    events = run.events(rank)
    columns = (events.kind, events.unit, events.phase, events.microbatch, events.bytes)
    found: dict[int, Counter[tuple[int, ...]]] = {step: Counter() for step in range(NUM_STEPS)}
    for step, *row in zip(events.step.tolist(), *(each.tolist() for each in columns), strict=True):
        if row[0] not in RANDOM and step in found:
            found[step][tuple(row)] += 1
    return found


def test_the_training_and_the_order_of_its_collectives_stay(case: Case) -> None:
    for seen in case.seen:
        for name in ("whole", "alike", "apart"):
            assert seen[name]["losses"] == seen["none"]["losses"], name
            assert seen[name]["orders"] == seen["whole"]["orders"], name
            assert seen[name]["problems"] == seen["whole"]["problems"], name


def test_a_detailed_step_has_the_rows_of_a_whole_recording(case: Case) -> None:
    for record in case.whole.ranks:
        whole, alike = (_rows(run, record.rank) for run in (case.whole, case.alike))
        for step in DETAILED:
            assert alike[step] == whole[step], step


def test_a_plain_step_has_the_rows_of_its_parts_only(case: Case) -> None:
    for record in case.whole.ranks:
        whole, alike = (_rows(run, record.rank) for run in (case.whole, case.alike))
        for step in sorted({*range(NUM_STEPS)} - {*DETAILED}):
            kept = {
                row: count
                for row, count in whole[step].items()
                if row[0] in PARTS and row[1] == NO_UNIT
            }
            assert alike[step] == kept, step


def test_a_plain_step_has_no_exposed_time(case: Case) -> None:
    plain = next(step for step in range(NUM_STEPS) if step not in DETAILED)
    with pytest.raises(MissingDataError, match=r"plain step.* exposed time is unknown\. Near it"):
        measure_step_breakdown(case.alike, rank=0, step=plain)


def test_analyses_use_the_steps_that_are_detailed_on_all_ranks(case: Case) -> None:
    chosen = select_steps(case.alike)
    assert list(chosen.timed) == [step for step in DETAILED if step >= 2]
    assert select_steps(case.apart).timed == (2, 3)
    assert "plain steps" in chosen.sentence


def test_a_failure_in_a_plain_step_is_placed_in_its_unit(case: Case, folder: Path) -> None:
    if case.name != "fsdp2":
        pytest.skip("one case fails")
    for record in open_run(folder / "failed").ranks:
        assert record.failure is not None
        assert record.failure.startswith("ArithmeticError at step 5, forward of layers.1")


def test_an_evaluation_is_no_part_of_a_plain_step(case: Case) -> None:
    if case.name not in EVALUATING:
        pytest.skip("this case is not evaluated")
    for run in (case.whole, case.alike):
        events = run.events(0, kinds=[EventKind.BETWEEN_STEPS])
        assert np.unique(events.step).tolist() == [5, 7]
