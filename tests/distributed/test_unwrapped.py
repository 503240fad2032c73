"""The launcher tells evaluations of the module inside DDP from the passes of a teacher."""

from pathlib import Path

import pytest

from fsdp_inspect.run import Run, open_run
from fsdp_inspect.trace.codes import EventKind
from tests.conftest import Torchrun
from tests.distributed.unwrapped_script import EVERY, NUM_STEPS

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("unwrapped_script.py")


@pytest.fixture(scope="module")
def recorded(torchrun: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, float]:
    """The run, and the seconds that rank 0 spent in evaluations."""
    folder = tmp_path_factory.mktemp("unwrapped")
    ended = torchrun(
        "-m", "fsdp_inspect.record", "--no-verdict", "--out", "runs", SCRIPT, cwd=folder
    )
    (path,) = (folder / "runs").iterdir()
    return open_run(path), float(ended.stdout.split()[-1])


def test_a_first_step_that_runs_in_a_closure_is_counted(recorded: tuple[Run, float]) -> None:
    assert recorded[0].summary().num_steps == NUM_STEPS
    assert recorded[0].notes == []


def test_evaluations_are_no_part_of_the_training(recorded: tuple[Run, float]) -> None:
    run, spent_s = recorded
    rows = run.source.events(0, kinds=[int(EventKind.BETWEEN_STEPS)])
    rows = rows.where(rows.flags == 0)  # no checkpoint
    assert rows.step.tolist() == [*range(EVERY, NUM_STEPS, EVERY), NUM_STEPS]

    lasted_s = run.lifetime().duration_ns("evaluation") / 1e9
    assert lasted_s == pytest.approx(spent_s, rel=0.05)
