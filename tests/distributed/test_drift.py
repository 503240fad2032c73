"""Changes of the step time that trainings inject, one recording for each cause."""

import os
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
"""The begin of a statement that names the cause, by cause."""
ON_REAL_CLOCK = ("garbage-of-one", "rank", "neighbours")
ON_A_FREE_CORE = "neighbours"
"""Other processes only cause a change on a core that was free before."""
NUM_TRIES = 2
QUICK = ("data", "garbage", "checkpoint")
"""On the virtual clock, so that a busy machine changes nothing."""

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def record(
    tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun, run_ranks: Torchrun
) -> Callable[[Sequence[str]], Path]:
    """Record trainings with some causes, each in a folder with its name."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}

    def run(causes: Sequence[str]) -> Path:
        folder = tmp_path_factory.mktemp("drift")
        real = [cause for cause in causes if cause in ON_REAL_CLOCK]
        virtual = [cause for cause in causes if cause not in ON_REAL_CLOCK]
        if virtual:
            torchrun(SCRIPT, folder, *virtual, num_ranks=3, environment=environment)
        if real:
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


@pytest.mark.slow
def test_what_changed_with_the_step_time_is_named(
    record: Callable[[Sequence[str]], Path],
) -> None:
    folder = record(QUICK)
    for cause in QUICK:
        check_is_named(folder, cause)
    for cause in ("data", "garbage"):
        [change] = fsdp_inspect.open_run(folder / cause).drift().changes
        assert any(NAMED[cause] in sentence for sentence in change.accounted_by)


@pytest.mark.study
def test_every_other_injected_cause_is_named(record: Callable[[Sequence[str]], Path]) -> None:
    others = [cause for cause in NAMED if cause not in (*QUICK, ON_A_FREE_CORE)]
    folder = record(others)
    for cause in others:
        check_is_named(folder, cause)


@pytest.mark.study
def test_processes_that_take_the_core_are_named(record: Callable[[Sequence[str]], Path]) -> None:
    for _ in range(NUM_TRIES):
        folder = record([ON_A_FREE_CORE])
        if fsdp_inspect.open_run(folder / ON_A_FREE_CORE).drift().changes:
            check_is_named(folder, ON_A_FREE_CORE)
            return
    busy = os.getloadavg()[0] - 1
    if busy > (os.cpu_count() or 1):
        pytest.skip(f"{busy:.0f} other processes took the cores before the change, too")
    pytest.fail("no change was found on a machine with a free core")
