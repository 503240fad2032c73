"""The ranks that share a node, and their number."""

import pytest

from fsdp_inspect.trace.run import hosts_of, ranks_per_node
from tests.builders import run_on


def test_a_rank_is_where_it_recorded_its_host():
    assert hosts_of(run_on(["a", "b", ""])) == {0: "a", 1: "b"}


def test_an_emulated_rank_is_on_the_node_that_was_asked_for():
    run = run_on(["here"] * 3, source="emulated", emulation={"gpus_per_node": 2})
    assert hosts_of(run) == {0: "node 0", 1: "node 0", 2: "node 1"}


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        pytest.param("aabb", 2, id="neighbours"),
        pytest.param("aaaa", 4, id="one node"),
        pytest.param("abcd", 1, id="one rank a node"),
        pytest.param("abab", None, id="not neighbours"),
        pytest.param("aabbb", None, id="uneven"),
        pytest.param(["a", "a", None, None], None, id="not known"),
        pytest.param("", None, id="no rank"),
    ],
)
def test_as_many_neighbours_share_each_node_or_nothing_is_said(hosts, size):
    assert ranks_per_node(hosts) == size
