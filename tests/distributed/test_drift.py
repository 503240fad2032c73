"""Changes of the step time that a training injects."""

from pathlib import Path

import pytest

import fsdp_inspect
from fsdp_inspect.analysis.drift import ChangePoint
from tests.conftest import Torchrun
from tests.distributed.drift_script import CHANGE

SCRIPT = Path(__file__).with_name("drift_script.py")

pytestmark = pytest.mark.distributed


def find_change(run_ranks: Torchrun, folder: Path, fault: str) -> ChangePoint:
    """The change point nearest to the injected one."""
    run_ranks(SCRIPT, folder / "run", fault)
    changes = fsdp_inspect.open_run(folder / "run").drift().changes
    assert changes
    return min(changes, key=lambda change: abs(change.step - CHANGE))


def test_data_that_takes_longer_accounts_for_the_change(
    run_ranks: Torchrun, tmp_path: Path
) -> None:
    change = find_change(run_ranks, tmp_path, "data")
    assert abs(change.step - CHANGE) <= 5
    assert any(sentence.startswith("data:") for sentence in change.accounted_by)


def test_a_rank_that_is_late_from_a_step_on_is_found(run_ranks: Torchrun, tmp_path: Path) -> None:
    change = find_change(run_ranks, tmp_path, "late")
    assert abs(change.step - CHANGE) <= 5
    # The median rank is the one that waits, or rank 1 itself.
    words = (*change.accounted_by, *change.coincident)
    assert any("rank 1" in word or word.startswith("other:") for word in words)
