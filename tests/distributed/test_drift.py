"""Changes of the step time that trainings inject, one recording for each cause."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import fsdp_inspect
from fsdp_inspect.diagnosis.diagnose import ProblemClass
from tests.conftest import Torchrun

SCRIPT = Path(__file__).with_name("drift_script.py")
CHANGE = 60
NAMED = {
    "data": "data: 10.0 ms to 70.0 ms",
    "garbage": "garbage collection: ",
    "checkpoint": "checkpoint written in the background: ",
    "memory": "process memory: ",
    "pages": "pages that the process reads from a disk: ",
    "garbage-of-one": "garbage collection",
    "rank": "own work of rank 1: ",
    "neighbours": "wait for a core",
}
"""By cause: the begin of a statement that names it."""
ON_REAL_CLOCK = ("garbage-of-one", "rank", "neighbours")
QUICK = ("data", "garbage", "checkpoint", "garbage-of-one")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def record(
    tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun, run_ranks: Torchrun
) -> Callable[[Sequence[str]], Path]:
    """Record trainings with some causes, each in a folder of its name."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}

    def run(causes: Sequence[str]) -> Path:
        folder = tmp_path_factory.mktemp("drift")
        real = [cause for cause in causes if cause in ON_REAL_CLOCK]
        virtual = [cause for cause in causes if cause not in ON_REAL_CLOCK]
        torchrun(SCRIPT, folder, *virtual, num_ranks=3, environment=environment)
        run_ranks(SCRIPT, folder, *real, num_ranks=3, environment=environment)
        return folder

    return run


def check_is_named(folder: Path, cause: str) -> None:
    run = fsdp_inspect.open_run(folder / cause)

    [change] = run.drift().changes
    assert abs(change.step - CHANGE) <= 5
    assert NAMED[cause] in " / ".join((*change.accounted_by, *change.coincident))

    found = run.diagnose()
    assert (found.problem, found.step) == (ProblemClass.DRIFT, change.step)


def test_what_changed_with_the_step_time_is_named(
    record: Callable[[Sequence[str]], Path],
) -> None:
    folder = record(QUICK)
    for cause in QUICK:
        check_is_named(folder, cause)
    for cause in ("data", "garbage"):
        [change] = fsdp_inspect.open_run(folder / cause).drift().changes
        assert any(NAMED[cause] in sentence for sentence in change.accounted_by)


@pytest.mark.slow
def test_every_other_injected_cause_is_named(record: Callable[[Sequence[str]], Path]) -> None:
    others = [cause for cause in NAMED if cause not in QUICK]
    folder = record(others)
    for cause in others:
        check_is_named(folder, cause)
