"""Mistakes that leave a training running are named, and legal loops that look alike are not."""

from pathlib import Path

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.diagnosis.diagnose import ProblemClass, Status
from fsdp_inspect.report.diagnosis import describe_diagnosis
from tests.conftest import Torchrun
from tests.distributed.correctness_script import LOOPS

SCRIPT = Path(__file__).with_name("correctness_script.py")
STALE = "The optimizer updates no parameter of the model."
SAME = "Ranks 0-1 read the same batches."
WEIGHTS = "Tokens on rank 1 weigh up to 10.0 times as much."
MISTAKES = {
    "stale-optimizer": STALE,
    "stale-optimizer-of-fsdp1": STALE,
    "same-batches": SAME,
    "same-batches-of-ddp": SAME,
    "token-means": WEIGHTS,
    "token-means-halved": WEIGHTS,
    "not-finite-first": WEIGHTS,
}

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> tuple[Path, str]:
    """A folder with a run of each loop, and what the ranks printed on stderr."""
    folder = tmp_path_factory.mktemp("correctness")
    ended = run_ranks(SCRIPT, folder)
    return folder, ended.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_before_the_speed(runs: tuple[Path, str], name: str) -> None:
    run = open_run(runs[0] / name)

    [fault] = run.correctness().faults
    verdict, found = run.summary().verdict, run.diagnose()

    assert fault.sentence == MISTAKES[name]
    assert len(fault.headline.split()) <= 12
    assert verdict.sentence == fault.headline
    assert verdict.next_steps[0] == fault.change
    assert (found.problem, found.ranks) == (ProblemClass.TRAINING, fault.ranks)
    assert found.is_certain is fault.is_certain is (fault.sentence == STALE)
    assert ("correctness_script.py:" in describe_diagnosis(found).sentence) is bool(fault.place)


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in MISTAKES])
def test_a_legal_loop_that_looks_alike_is_no_mistake(runs: tuple[Path, str], name: str) -> None:
    run = open_run(runs[0] / name)

    assert run.correctness().faults == ()
    assert run.diagnose().status is Status.HEALTHY


def test_what_was_not_observed_is_not_checked(runs: tuple[Path, str]) -> None:
    unknown = {name: open_run(runs[0] / name).correctness().not_checked for name in LOOPS}

    assert unknown["plain"] == {}
    assert list(unknown["one-batch"]) == ["batches"]
    assert list(unknown["sum-over-tokens"]) == list(unknown["two-losses"]) == ["loss"]


def test_a_stale_optimizer_is_printed_at_its_first_update(runs: tuple[Path, str]) -> None:
    printed = runs[1].count("rank 0: The optimizer updates no parameter of the model (")
    assert printed == 2
