"""In fewer than 5% of runs, ranks that differ by chance are called stragglers or slow groups."""

import numpy as np
import pytest

from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from tests.analysis.stragglers.test_ranks import build_run
from tests.cube_run import cube_run

JITTERS = {
    "uniform": lambda random, shape: random.uniform(0, 1, shape),
    "exponential": lambda random, shape: random.exponential(1, shape),
    "heavy tails": lambda random, shape: random.pareto(1.2, shape),
}
RUNS = 60


@pytest.mark.study
@pytest.mark.parametrize("jitter", JITTERS.values(), ids=JITTERS)
@pytest.mark.parametrize(("num_ranks", "num_steps"), [(2, 4), (2, 6), (4, 4)])
def test_symmetric_jitter_makes_a_straggler_in_less_than_5_percent(num_ranks, num_steps, jitter):
    random = np.random.default_rng(11)
    found = 0
    for _ in range(RUNS):
        works = 10_000 + 5_000 * jitter(random, (num_steps, num_ranks))
        found += measure_ranks(build_run(*works.astype(int).tolist())).straggler is not None
    assert found < 0.05 * RUNS


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_later_than_the_jitter_is_found_whichever_it_is(late):
    random = np.random.default_rng(11)
    for _ in range(20):
        works = 10_000 + random.integers(0, 1_000, (8, 2))
        works[:, late] += 3_000
        straggler = measure_ranks(build_run(*works.tolist())).straggler
        assert straggler.rank == late
        assert 2_000 < straggler.cost_ns < 4_000


@pytest.mark.study
@pytest.mark.parametrize("jitter", JITTERS.values(), ids=JITTERS)
@pytest.mark.parametrize("num_steps", [2, 3, 6])
def test_symmetric_jitter_makes_a_slow_group_in_less_than_5_percent(num_steps, jitter):
    random = np.random.default_rng(11)
    found = 0
    for _ in range(RUNS):
        works = (10_000 + 5_000 * jitter(random, (num_steps, 8))).astype(int).tolist()
        run = cube_run([dict(enumerate(work)) for work in works], hosts=("a",) * 4 + ("b",) * 4)
        found += measure_ranks(run).slow_group is not None
    assert found < 0.05 * RUNS
