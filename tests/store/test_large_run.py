"""A small run of the scale benchmark is like any other run."""

from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.reduction.memory_parts import MEMORY_PARTS
from fsdp_inspect.store.reduction.run_statistics import summarise_rank
from fsdp_inspect.trace.run import RunStatus
from tests.store.run_files import assert_same_rows
from tests.studies.benchmarks.large_run import Shape, write_large_run, write_part

SHAPE = Shape(num_ranks=4, num_steps=6, num_units=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large_run(tmp_path_factory.mktemp("large") / "run", SHAPE, processes=1)


@pytest.fixture
def run(path: Path) -> StoredRun:
    return open_run(path)


def test_large_run_is_complete_and_has_no_notes(run: StoredRun) -> None:
    assert (run.status, list(run.notes)) == (RunStatus.COMPLETE, [])
    assert [record.rank for record in run.ranks] == [0, 1, 2, 3]


def test_large_run_sums_up_what_its_ranks_recorded(run: StoredRun) -> None:
    expected = summarise_rank(run.events(2), run.memory(2), memory_from="cuda_allocator", rank=2)
    assert_same_rows(run.summary(ranks=[2]), expected)
    assert len(run.summary(kinds=MEMORY_PARTS)) == 4 * 6 * 4


def test_ranks_of_a_large_run_differ(run: StoredRun) -> None:
    lengths = {int(np.sum(run.events(rank).end_ns - run.events(rank).start_ns)) for rank in (0, 1)}
    assert len(lengths) == 2


def test_first_ranks_of_a_large_run_are_a_run_of_their_own(path: Path, tmp_path: Path) -> None:
    part = open_run(write_part(path, tmp_path / "part", Shape(2, 6, 3)))
    assert (part.status, part.manifest.world_size) == (RunStatus.COMPLETE, 2)
    assert_same_rows(part.summary(), open_run(path).summary(ranks=[0, 1]))


def test_large_run_is_analysed_like_any_other(run: StoredRun) -> None:
    digest = measure_summary(run)
    assert digest.breakdown is not None
    assert sum(part.duration_ns for part in digest.breakdown.parts) == (
        digest.breakdown.step_time_ns
    )
    assert digest.exposed_ns is not None
    assert digest.communication_ns is not None
    assert 0 < digest.exposed_ns < digest.communication_ns
    assert digest.collectives_per_step == 9
