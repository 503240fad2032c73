"""All ranks of a job are killed together: the run opens with each row that was on disk."""

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from tests.cases import mark_slow
from tests.store.appending_process import (
    appending_rank,
    assert_first_events,
    wait_for_flush,
)
from tests.store.run_files import make_manifest

pytestmark = pytest.mark.distributed

INTERVAL_S = 0.2
RANKS = (0, 1)


@pytest.mark.parametrize("seed", mark_slow(range(3), but=[0]))
def test_all_ranks_killed_at_once_leave_a_run_that_opens_and_compacts(
    tmp_path: Path, seed: int
) -> None:
    run = tmp_path / "run"
    create_run(run, make_manifest(world_size=2))
    with ExitStack() as stack:
        children = [stack.enter_context(appending_rank(run, rank, 2, INTERVAL_S)) for rank in RANKS]
        for rank in RANKS:
            wait_for_flush(run, rank)
        time.sleep(random.Random(seed).uniform(0, 3 * INTERVAL_S))
        num_on_disk = {rank: wait_for_flush(run, rank) for rank in RANKS}
        for child in children:
            child.kill()
    opened = open_run(run)
    assert opened.status is RunStatus.CUT_OFF
    assert "Ranks 0-1 stopped without a recorded end" in opened.notes[0]
    for rank in RANKS:
        assert_first_events(opened, rank, at_least=num_on_disk[rank])
    before = {rank: len(opened.events(rank)) for rank in RANKS}
    assert compact_run(run).skipped == []
    after = open_run(run)
    assert {rank: len(after.events(rank)) for rank in RANKS} == before
    assert after.status is RunStatus.CUT_OFF
