import numpy as np
import pytest

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.links import bus_bytes_per_s, bus_factor
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder

FOUR_RANKS = [ProcessGroup(index=0, name="shard", ranks=[0, 1, 2, 3])]


@pytest.mark.parametrize(
    ("kind", "num_ranks", "factor"),
    [
        pytest.param(EventKind.ALL_GATHER, 4, 0.75, id="all-gather"),
        pytest.param(EventKind.REDUCE_SCATTER, 8, 0.875, id="reduce-scatter"),
        pytest.param(EventKind.ALL_REDUCE, 4, 1.5, id="all-reduce moves it twice"),
        pytest.param(EventKind.ALL_GATHER, 1, 0.0, id="one rank"),
        pytest.param(EventKind.ALL_GATHER, 0, 0.0, id="no group"),
        pytest.param(EventKind.BARRIER, 4, 0.0, id="nothing travels"),
    ],
)
def test_the_bus_carries_what_nccl_tests_count(kind, num_ranks, factor):
    assert bus_factor(kind, num_ranks) == factor


def test_the_bandwidth_of_an_event_is_its_bus_bytes_over_its_duration():
    rank = RunBuilder().rank(0)
    rank.all_gather("layers.0", 0, 100, bytes=1000, group=0)
    rank.all_reduce("layers.0", 0, 100, bytes=1000, group=0)
    rates = bus_bytes_per_s(EventTable.from_rows(rank.events), FOUR_RANKS)
    assert rates.tolist() == [7.5e9, 15e9]


def test_what_has_no_bandwidth_is_not_a_number():
    rank = RunBuilder().rank(0)
    rank.forward("layers.0", 0, 10)
    rank.all_gather("layers.0", 0, 0, bytes=10)
    rank.all_gather("layers.0", 0, 10, bytes=-1)
    rank.all_gather("layers.0", 0, 10, bytes=10, group=7)
    assert np.isnan(bus_bytes_per_s(EventTable.from_rows(rank.events), FOUR_RANKS)).all()
