"""Matched collectives of the ranks that communicate with each other."""

import pytest

from fsdp_inspect.analysis.shared_collectives import NO_KEY, Matching, describe_key
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.mesh_dimensions import members_of
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder


def group(*ranks: int) -> ProcessGroup:
    return ProcessGroup(index=0, name="", ranks=list(ranks))


@pytest.mark.parametrize(
    ("ranks", "rank", "members"),
    [
        pytest.param((0, 1, 2, 3), 2, (0, 1, 2, 3), id="the group itself"),
        pytest.param((0, 1), 5, (4, 5), id="another shard group"),
        pytest.param((0, 4), 6, (2, 6), id="another replica group"),
        pytest.param((4, 5, 6, 7), 1, (0, 1, 2, 3), id="as the second node saw it"),
        pytest.param((3, 1, 0), 1, (3, 1, 0), id="any order, from inside"),
        pytest.param((3, 1, 0), 2, (), id="no mesh, from outside"),
        pytest.param((0, 3, 6), 1, (), id="does not tile the world"),
        pytest.param((1, 2), 4, (), id="not where a mesh puts it"),
    ],
)
def test_a_rank_finds_its_partners(ranks, rank, members):
    assert members_of(ranks, rank, 8) == members


def rows(*rows) -> EventTable:
    rank = RunBuilder().rank(0)
    for columns in rows:
        rank.add(EventKind.ALL_GATHER, 0, 1, **columns)
    return EventTable.from_rows(rank.events)


def test_the_same_collective_has_one_key_on_both_ranks_and_no_other_has_it():
    matching = Matching([group(0, 1)], 4)
    events = rows({"group": 0, "sequence": 7}, {"group": 0, "sequence": 8})
    first, second = matching.keys(events, 0), matching.keys(events, 1)
    assert first.tolist() == second.tolist()
    assert len({*first.tolist(), *matching.keys(events, 2).tolist()}) == 4


def test_what_cannot_be_matched_has_no_key():
    matching = Matching([group(0, 1)], 2)
    events = rows({"group": -1, "sequence": 0}, {"group": 0}, {"group": 5, "sequence": 1})
    assert matching.keys(events, 0).tolist() == [NO_KEY] * 3


def test_a_key_reads_as_a_collective_of_a_group():
    key = int(Matching([group(0, 1)], 2).keys(rows({"group": 0, "sequence": 17}), 1)[0])
    assert describe_key(key) == "collective 17 of process group 0"
