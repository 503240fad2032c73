from fsdp_inspect.analysis.shared_collectives import find_transfers
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from tests.builders import RunBuilder


def run_of(*spans, kind=EventKind.ALL_GATHER, **columns):
    """A run with one collective; `spans` has its start and end on each rank."""
    builder = RunBuilder(world_size=len(spans))
    for rank, (start, end) in enumerate(spans):
        builder.rank(rank).step(0, 0, 10_000)
        row = {"group": 0, "sequence": 0, "bytes": 64, **columns}
        builder.rank(rank).add(kind, start, end, unit="layers.0", **row)
    return builder.build()


def transfers_of(run, ranks=(0, 1, 2)):
    collectives = run.events(0, kinds=sorted(COLLECTIVES))
    return find_transfers(run, 0, collectives, ranks).tolist()


def test_the_transfer_is_the_shortest_duration_whatever_the_clocks():
    assert transfers_of(run_of((0, 100), (5_040, 5_090), (2_010, 2_080))) == [50]


def test_time_in_a_queue_on_another_rank_is_no_transfer():
    builder = RunBuilder(world_size=2)
    for rank in (0, 1):
        builder.rank(rank).step(0, 0, 1000)
        builder.rank(rank).reduce_scatter("layers.0", 0, 60 + 10 * rank, sequence=0)
        builder.rank(rank).all_gather("layers.0", 30, 100, issue_ns=20, sequence=1)
    assert transfers_of(builder.build()) == [60, 30]


def test_ranks_that_are_not_read_do_not_tell():
    run = run_of((0, 100), (40, 90), (10, 80))
    assert transfers_of(run, ranks=(0, 2)) == [70]
    assert transfers_of(run, ranks=(0,)) == [-1]


def test_a_collective_that_no_other_rank_shows_is_unknown():
    assert transfers_of(run_of((0, 100), (0, 90), sequence=-1)) == [-1]


def test_ranks_need_not_wait_for_each_other_in_every_kind():
    assert transfers_of(run_of((0, 100), (0, 90), kind=EventKind.BROADCAST)) == [-1]
