"""Ranks that share a node, and the bandwidth of groups there, from runs and from users."""

from dataclasses import replace

import numpy as np
import pytest

from fsdp_inspect.analysis.link_fit import fit_link
from fsdp_inspect.simulation.network import CostLine, Network, NodeLink, find_node
from fsdp_inspect.trace.codes import EventKind
from tests.builders import InMemoryRun, run_on

WHOLE = CostLine(50_000, 10e9)
INSIDE = CostLine(20_000, 300e9)
NETWORK = Network({EventKind.ALL_GATHER: WHOLE})
EMULATED = {
    "gpus_per_node": 4,
    "intra": {"bandwidth_bytes_per_s": 300e9, "latency_ns": 20_000},
    "inter": {"bandwidth_bytes_per_s": 2.5e9, "latency_ns": 50_000},
}


def network_of(run: InMemoryRun, network: Network = NETWORK) -> Network:
    ranks = range(run.manifest.world_size)
    return replace(network, node=find_node(run, network, ranks))


def test_ranks_of_one_host_gather_as_fast_in_groups_as_all_together():
    sizes = np.array([1000, 2000, 4000])
    fitted = fit_link(sizes, sizes + 10, 1.0)
    assert fitted is not None
    line = CostLine(fitted.latency_ns, fitted.bus_bytes_per_s, fitted)
    network = network_of(run_on(["a"] * 8), Network({EventKind.ALL_GATHER: line}))
    found, assumption = network.line_of_smaller(4, 8)
    assert found == line
    assert assumption == (
        "A group of 4 ranks is assumed to be as fast as the shard group, which lies within a node."
    )


def test_hosts_tell_how_many_ranks_share_a_node_and_not_their_link():
    network = network_of(run_on(["a"] * 4 + ["b"] * 4))
    assert network.node.num_ranks == 4
    assert network.line_of_smaller(4, 8) == (None, "")


def test_groups_across_whole_nodes_are_as_fast_as_all_ranks():
    network = network_of(run_on([name for name in "abcd" for _ in range(2)]))
    line, assumption = network.line_of_smaller(4, 8)
    assert line == WHOLE
    assert "whole nodes of 2 ranks" in assumption


@pytest.mark.parametrize(
    "hosts",
    [["a", "a", "b", "b", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "", ""]],
    ids=["uneven", "not neighbours", "not told"],
)
def test_ranks_that_are_spread_otherwise_tell_nothing(hosts: list[str]):
    assert network_of(run_on(hosts)).node.num_ranks is None


def test_an_emulated_network_says_how_fast_a_node_is():
    run = run_on(["here"] * 8, source="emulated", emulation=EMULATED)
    assert network_of(run).line_of_smaller(2, 8) == (INSIDE, "")


def test_groups_that_a_run_had_are_known_and_their_parts_are_taken_to_be_alike():
    network = Network({EventKind.ALL_GATHER: WHOLE}, smaller={4: INSIDE})
    assert network.line_of_smaller(4, 8) == (INSIDE, "")
    assert network.line_of_smaller(2, 8)[0] == INSIDE
    assert network.line_of_smaller(8, 16)[0] is None


def test_what_the_user_says_of_a_node_holds_beside_another_network():
    given = NETWORK.change_node(NodeLink(300e9, 20_000)).change(bus_bytes_per_s=1e9, latency_ns=0)
    assert given.line_of_smaller(4, 8) == (INSIDE, "")
    assert given.lines[EventKind.ALL_GATHER] == CostLine(0, 1e9)


def test_a_link_that_is_given_holds_for_groups_across_the_nodes_of_the_run_too():
    network = network_of(run_on(["a"] * 2 + ["b"] * 2 + ["c"] * 2))
    assert network.line_of_smaller(3, 6)[0] is None
    assert network.change_node(NodeLink(300e9, 20_000)).line_of_smaller(3, 6) == (INSIDE, "")


def test_another_network_holds_in_nodes_too_unless_they_are_told_apart():
    changed = NETWORK.change(bus_bytes_per_s=1e9, latency_ns=5)
    assert changed.line_of_smaller(4, 8) == (CostLine(5, 1e9), "")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        pytest.param({"latency_ns": 5.0}, CostLine(5.0, 300e9), id="latency"),
        pytest.param({"bus_bytes_per_s": 1e9}, CostLine(20_000, 1e9), id="bandwidth"),
        pytest.param({"latency_ns": 5.0, "bus_bytes_per_s": 1e9}, CostLine(5.0, 1e9), id="both"),
    ],
)
def test_another_network_leaves_of_groups_that_a_run_had_what_it_does_not_name(
    change: dict[str, float], line: CostLine
):
    network = Network({EventKind.ALL_GATHER: WHOLE}, smaller={4: INSIDE}).change(**change)
    assert network.line_of_smaller(4, 8) == (line, "")
    assert network.line_of_smaller(2, 8)[0] == line


def test_a_latency_alone_needs_a_bandwidth_that_is_known():
    with pytest.raises(ValueError, match="Expected both"):
        NETWORK.change_node(NodeLink(latency_ns=1.0))
    known = NETWORK.change_node(NodeLink(300e9, 20_000)).change_node(NodeLink(latency_ns=1.0))
    assert known.node.line == CostLine(1.0, 300e9)
