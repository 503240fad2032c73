"""Mistakes of the training are named under each sharder, and legal loops that look alike are not.

The quick tests run some loops that are unlike those of `test_correctness`; `--exhaustive` runs all.
"""

from pathlib import Path

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.diagnosis.diagnose import ProblemClass, Status
from fsdp_inspect.report.diagnosis import describe_diagnosis
from tests.cases import chosen_cases, mark_slow
from tests.conftest import Torchrun
from tests.distributed import correctness_odd_loops
from tests.distributed.correctness_sharders import LOOPS, MISTAKES, NOTES

SCRIPT = Path(__file__).with_name("correctness_sharders.py")
CERTAIN = ("updated-on-rank-0", "clipped-while-scaled", "shards-reduced-again", "never-cleared")


QUICK = (
    *("summed-again-ddp", "buffers-of-other-seeds-fsdp2", "noise-of-each-rank-ddp"),
    *("clipped-while-scaled-fsdp2", "data-read-again-fsdp2", "loss-of-one-rank-fsdp2"),
    *("epoch-set-fsdp2", "updated-on-rank-0-only-fsdp2", "skipped-by-the-scaler-ddp"),
    *("named-optimizer-of-a-part-fsdp2", "means-of-unequal-microbatches-fsdp2"),
)
CASES = mark_slow(LOOPS, but=QUICK)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun
) -> Path:
    """A folder with a run of each loop that the tests of this module read."""
    folder = tmp_path_factory.mktemp("sharders")
    run_ranks(SCRIPT, folder, *filter(chosen_cases(request, "name"), LOOPS))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_loop_has_the_mistake_that_was_planted_or_none(runs: Path, name: str) -> None:
    run = open_run(runs / name)

    seen, found = run.correctness(), run.diagnose()

    expected = [MISTAKES[name]] if name in MISTAKES else []
    assert [fault.sentence for fault in seen.faults] == expected
    assert [note.sentence for note in seen.notes] == ([NOTES[name]] if name in NOTES else [])
    assert all(len(each.headline.split()) <= 12 for each in (*seen.faults, *seen.notes))
    if expected:
        assert (found.problem, found.ranks) == (ProblemClass.TRAINING, seen.faults[0].ranks)
        assert found.is_certain is name.startswith(CERTAIN)
    else:
        assert found.status is Status.HEALTHY
    assert not any("not checked" in each for record in run.source.ranks for each in record.problems)


@pytest.mark.parametrize("name", [name for name in NOTES if name in QUICK])
def test_a_note_is_evidence_of_a_healthy_run(runs: Path, name: str) -> None:
    run = open_run(runs / name)

    evidence = describe_diagnosis(run.diagnose()).evidence

    [line] = [line for line in evidence if line.startswith("Note: ")]
    assert NOTES[name] in line
    assert run.summary().verdict.limit is not Limit.TRAINING
    assert any(each.endswith(line[-40:]) for each in run.summary().notes)


@pytest.fixture(scope="module")
def odd_runs(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Path:
    """A folder with a run of each odd loop."""
    folder = tmp_path_factory.mktemp("odd")
    run_ranks(SCRIPT.with_name("correctness_odd_loops.py"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", correctness_odd_loops.LOOPS)
def test_an_odd_healthy_loop_is_no_mistake(odd_runs: Path, name: str) -> None:
    run = open_run(odd_runs / name)

    assert run.correctness().faults == run.correctness().notes == ()
    assert run.diagnose().status is Status.HEALTHY
    assert not any("not checked" in each for record in run.source.ranks for each in record.problems)
