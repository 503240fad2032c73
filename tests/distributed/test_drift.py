"""Changes of the step time that a training injects."""

from pathlib import Path

import pytest

import fsdp_inspect
from fsdp_inspect.diagnosis.diagnose import ProblemClass
from tests.conftest import Torchrun

CHANGE = 60

pytestmark = pytest.mark.distributed


def test_data_that_takes_longer_accounts_for_the_change(torchrun: Torchrun, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    script = Path(__file__).with_name("drift_script.py")
    torchrun(script, tmp_path / "run", environment=environment)
    run = fsdp_inspect.open_run(tmp_path / "run")

    [change] = run.drift().changes
    assert abs(change.step - CHANGE) <= 5
    assert any(sentence.startswith("data:") for sentence in change.accounted_by)

    found = run.diagnose()
    assert (found.problem, found.step) == (ProblemClass.DRIFT, change.step)
