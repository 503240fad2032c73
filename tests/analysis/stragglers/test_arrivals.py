"""Late ranks, their delays, and the duration of the transfer alone."""

import pytest

from fsdp_inspect.analysis.clocks.alignment import Alignment, align_clocks
from fsdp_inspect.analysis.stragglers.arrivals import NEVER, Lateness, find_arrivals
from fsdp_inspect.trace.codes import EventFlag, Phase
from tests.builders import RunBuilder


@pytest.fixture
def run():
    """Three collectives that end together: rank 1 is last, then rank 0, then rank 1."""
    builder = RunBuilder()
    for rank, starts in enumerate([(0, 150, 200), (40, 120, 230)]):
        one = builder.rank(rank)
        one.record = {"host": "a"}
        one.step(0, 0, 300)
        for sequence, (start, end) in enumerate(zip(starts, (60, 160, 270), strict=True)):
            one.all_gather("layers.0", start, end, sequence=sequence)
    return builder.build()


@pytest.fixture
def arrivals(run):
    return find_arrivals(run, (0, 1), [0], align_clocks(run))


def test_skew_is_the_spread_of_the_arrivals_and_the_transfer_the_shortest_duration(arrivals):
    assert arrivals.skew_ns().tolist() == [40, 30, 30]
    assert arrivals.transfer_ns.tolist() == [20, 10, 40]
    assert arrivals.spread_ns.tolist() == [40, 30, 30]


def test_the_last_rank_is_the_one_that_waits_least(arrivals):
    assert arrivals.last().tolist() == arrivals.shortest.tolist() == [1, 0, 1]


def test_lateness_is_counted_for_each_rank(arrivals):
    lateness = Lateness(arrivals)
    assert lateness.last_ratio(1) == pytest.approx(2 / 3)
    assert lateness.typical_ns(1) == 30
    assert lateness.shortest_ratio(0) == pytest.approx(1 / 3)
    assert lateness.last_ratio(7) is None


def test_transfers_are_known_without_clocks_and_arrivals_are_not(run):
    alone = Alignment(None, {}, {})
    arrivals = find_arrivals(run, (0, 1), [0], alone)
    assert arrivals.transfer_ns.tolist() == [20, 10, 40]
    assert (arrivals.arrival_ns == NEVER).all()
    assert len(arrivals.aligned()) == 0
    assert Lateness(arrivals).typical_ns(1) is None


@pytest.mark.parametrize(("num_bounds", "num_timed"), [(0, 3), (1, 2), (2, 0)])
def test_an_end_that_is_an_upper_bound_is_no_transfer_and_evaluation_is_left_out(
    num_bounds, num_timed
):
    builder = RunBuilder()
    for rank in (0, 1):
        one = builder.rank(rank)
        one.step(0, 0, 500)
        for place in range(3):
            flags = EventFlag.LATEST_END * (place < num_bounds)
            start = 100 * place
            one.all_gather("layers.0", start, start + 50, sequence=place, flags=flags)
        one.all_gather("layers.0", 400, 450, sequence=3, phase=Phase.EVALUATION)
    run = builder.build()
    arrivals = find_arrivals(run, (0, 1), [0], align_clocks(run))
    assert len(arrivals) == 3
    assert len(arrivals.timed()) == num_timed


def test_no_ranks_have_no_arrivals(run):
    assert len(find_arrivals(run, (), [0], align_clocks(run))) == 0
