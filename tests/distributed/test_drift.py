"""Changes of the step time that trainings inject, one recording for each cause."""

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
    "memory": "process memory: ",
    "pages": "pages that the process reads from a disk: ",
    "checkpoint": "checkpoint written in the background: ",
    "rank": "own work of rank 1: ",
    "garbage-of-one": "garbage collection: ",
    "neighbours": "wait for a core",
}
"""By cause: the begin of a statement that names it."""
ON_REAL_CLOCK = ("rank", "garbage-of-one", "neighbours")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun, run_ranks: Torchrun
) -> Path:
    """The recordings of all causes, each in a folder of its name."""
    folder = tmp_path_factory.mktemp("drift")
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    on_virtual_clock = [cause for cause in NAMED if cause not in ON_REAL_CLOCK]
    torchrun(SCRIPT, folder, *on_virtual_clock, num_ranks=3, environment=environment)
    run_ranks(SCRIPT, folder, *ON_REAL_CLOCK, num_ranks=3, environment=environment)
    return folder


@pytest.mark.parametrize("cause", NAMED)
def test_what_changed_with_the_step_time_is_named(folder: Path, cause: str) -> None:
    run = fsdp_inspect.open_run(folder / cause)

    [change] = run.drift().changes
    assert abs(change.step - CHANGE) <= 5
    stated = " / ".join((*change.accounted_by, *change.coincident))
    assert NAMED[cause] in stated

    found = run.diagnose()
    assert (found.problem, found.step) == (ProblemClass.DRIFT, change.step)


def test_what_takes_the_time_accounts_for_it(folder: Path) -> None:
    for cause in ("data", "garbage"):
        [change] = fsdp_inspect.open_run(folder / cause).drift().changes
        assert any(NAMED[cause] in sentence for sentence in change.accounted_by)
