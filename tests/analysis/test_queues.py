from fsdp_inspect.analysis.shared_collectives import queue_up
from fsdp_inspect.trace.codes import EventKind, Stream
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder


def collectives_of(*rows):
    """Collectives of one rank, `(issue, start, end, group, stream)` each."""
    builder = RunBuilder()
    for issue, start, end, group, stream in rows:
        columns = {"issue_ns": issue, "group": group, "stream": stream}
        builder.rank(0).add(EventKind.ALL_GATHER, start, end, **columns)
    return builder.build().event_tables[0]


GATHER, SCATTER = Stream.ALL_GATHER, Stream.REDUCE_SCATTER


def test_the_one_issued_before_on_the_same_communicator_is_ahead():
    queue = queue_up(collectives_of((0, 0, 10, 0, SCATTER), (1, 2, 15, 0, GATHER)))
    assert queue.ahead.tolist() == [-1, 0]
    assert queue.turn_ns.tolist() == [0, 10]


def test_the_order_is_that_of_issue_not_that_of_the_rows():
    queue = queue_up(collectives_of((5, 5, 20, 0, GATHER), (1, 1, 10, 0, GATHER)))
    assert queue.ahead.tolist() == [1, -1]


def test_another_communicator_is_never_ahead():
    queue = queue_up(collectives_of((0, 0, 10, 0, SCATTER), (1, 2, 15, 1, GATHER)))
    assert queue.ahead.tolist() == [-1, -1]
    assert queue.turn_ns.tolist() == [0, 2]


def test_collectives_without_a_group_are_alone():
    queue = queue_up(collectives_of((0, 0, 10, -1, GATHER), (1, 2, 15, -1, GATHER)))
    assert queue.ahead.tolist() == [-1, -1]


def test_one_that_was_overtaken_is_not_ahead():
    queue = queue_up(collectives_of((0, 0, 30, 0, GATHER), (1, 2, 15, 0, GATHER)))
    assert queue.ahead.tolist() == [-1, -1]
    assert queue.turn_ns.tolist() == [0, 2]


def test_the_last_one_on_the_same_stream_is_known_beside_the_one_ahead():
    rows = (0, 0, 10, 0, GATHER), (1, 1, 20, 0, SCATTER), (2, 10, 25, 0, GATHER)
    queue = queue_up(collectives_of(*rows))
    assert queue.ahead.tolist() == [-1, 0, 1]
    assert queue.same_stream_end_ns[2] == 10


def test_a_rank_without_collectives_has_no_queue():
    assert len(queue_up(EventTable.empty()).turn_ns) == 0
