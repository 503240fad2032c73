import pytest

from fsdp_inspect.analysis.step_times import RankOverlap
from fsdp_inspect.analysis.stragglers.ranks import (
    find_late_ranks,
    may_have_late_ranks,
    measure_ranks,
)
from tests.llama70b import STRAGGLER, llama_70b_run


def rank_of(rank, exposed, step_time=1000):
    return RankOverlap(
        rank=rank,
        host="",
        num_steps=1,
        step_time_ns=step_time,
        communication_ns=exposed,
        exposed_ns=exposed,
        overlap_ratio=0.0,
        communication_bytes=0,
        collectives_per_step=0,
    )


@pytest.mark.parametrize(
    ("exposed", "suspected"),
    [
        pytest.param([100, 100, 100], False, id="all wait alike"),
        pytest.param([100, 60, 100], False, id="4% of the step"),
        pytest.param([100, 50, 100], True, id="one waits 5% of the step less"),
        pytest.param([100, 400, 100], False, id="one waits more: it is early, nobody is late"),
        pytest.param([100], False, id="one rank"),
        pytest.param([], False, id="none"),
    ],
)
def test_a_rank_that_waits_less_than_the_others_is_suspected(exposed, suspected):
    ranks = [rank_of(rank, value) for rank, value in enumerate(exposed)]
    assert may_have_late_ranks(ranks) is suspected


class Reading:
    """A run that notes the ranks whose events are read."""

    def __init__(self, run):
        self._run, self.read = run, set()

    def __getattr__(self, name):
        return getattr(self._run, name)

    def events(self, rank, **limits):
        self.read.add(rank)
        return self._run.events(rank, **limits)


def test_without_suspicion_no_events_are_read():
    run = Reading(llama_70b_run())
    assert find_late_ranks(run, [rank_of(rank, 100) for rank in range(8)]) is None
    assert run.read == set()


def test_a_suspicion_is_confirmed_with_what_the_ranks_command_says():
    run = llama_70b_run(4)
    ranks = [rank_of(rank, 0 if rank == STRAGGLER else 500) for rank in range(8)]
    found, told = find_late_ranks(run, ranks), measure_ranks(run).straggler
    assert (found.rank, found.host) == (STRAGGLER, "")  # all ranks run on one machine
    assert (found.cost_ns, found.last_ratio) == (told.cost_ns, told.last_ratio)
