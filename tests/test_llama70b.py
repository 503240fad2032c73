"""The synthetic Llama-70B run has the published counts and sizes."""

import numpy as np
import pytest

from fsdp_inspect.trace.codes import DTYPES, EventKind
from tests.llama70b import (
    BLOCK_PARAMETERS,
    NUM_COLLECTIVES,
    NUM_LAST,
    PUBLISHED,
    ROOT_PARAMETERS,
    STRAGGLER,
    WORLD_SIZE,
    llama_70b_run,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def run():
    return llama_70b_run()


def test_units_have_the_published_parameters():
    assert BLOCK_PARAMETERS == 855_654_400
    assert ROOT_PARAMETERS == 2_101_354_496


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.kind.label}-{row.bytes}")
def test_a_rank_has_the_published_number_of_each_collective(run, row):
    events = run.events(0)
    same = events.where((events.kind == row.kind) & (events.bytes == row.bytes))
    assert len(same) == row.count
    assert {DTYPES[code] for code in same.dtype.tolist()} == {row.dtype}


def test_messages_are_as_large_as_published():
    sizes = [round(row.bytes / MIB, 2) for row in PUBLISHED]
    assert sizes == [1632.03, 3264.06, 4008.02, 8016.03, 0.0]


def test_rank_4_arrives_last_at_86_percent_of_the_collectives(run):
    kinds = [EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE]
    starts = np.array([run.events(rank, kinds=kinds).start_ns for rank in range(WORLD_SIZE)])
    last = np.argmax(starts, axis=0)
    assert starts.shape[1] == NUM_COLLECTIVES
    assert np.count_nonzero(last == STRAGGLER) == NUM_LAST
    assert round(100 * NUM_LAST / NUM_COLLECTIVES, 1) == 86.1
