"""The node of each rank, and the bandwidth within a node and between nodes."""

from fsdp_inspect.advice.evidence import find_node_links
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import RunBuilder

SHARD = ProcessGroup(index=0, name="shard", ranks=[0, 1, 2, 3], role="shard")
NODE = ProcessGroup(index=1, name="node", ranks=[0, 1], role="post_forward")


def run_of(*, hosts=("a", "a", "b", "b"), groups=(SHARD, NODE), inside: bool = True, **manifest):
    """64 B over four ranks in 96 ns, across nodes; the same over two ranks of a node in 8 ns."""
    builder = RunBuilder(
        ("layers.0",), world_size=4, process_groups=list(groups), device_type="cuda", **manifest
    )
    for number, host in enumerate(hosts):
        rank = builder.rank(number)
        rank.record.update(host=host)
        rank.step(0, 0, 200)
        rank.all_gather("layers.0", 0, 96, need=0)
        if inside:
            rank.all_gather("layers.0", 100, 108, need=100, group=1)
    return builder.build()


def test_bandwidths_across_and_inside_are_those_of_the_runs_collectives():
    links = find_node_links(run_of())
    assert (links.num_nodes, links.ranks_per_node) == (2, 2)
    assert links.across_bytes_per_s == 64 * 0.75 / 96 * 1e9
    assert links.within_bytes_per_s == 64 * 0.5 / 8 * 1e9
    assert links.within_from == "measured: 1 all-gathers of 2"


def test_a_node_in_which_nothing_ran_has_no_speed():
    assert find_node_links(run_of(inside=False)).within_bytes_per_s is None


def test_an_emulated_node_has_the_link_that_was_asked_for():
    emulation = {"gpus_per_node": 2, "intra": {"bandwidth_bytes_per_s": 400e9, "latency_ns": 0}}
    links = find_node_links(
        run_of(hosts=("x",), inside=False, source="emulated", emulation=emulation)
    )
    assert (links.num_nodes, links.within_bytes_per_s) == (2, 400e9)


def test_an_emulated_link_is_known_and_not_measured():
    emulation = {"gpus_per_node": 2, "intra": {"bandwidth_bytes_per_s": 400e9, "latency_ns": 0}}
    links = find_node_links(run_of(source="emulated", emulation=emulation))
    assert (links.within_bytes_per_s, links.within_from) == (400e9, "the emulated link")


def test_nothing_is_said_of_one_node_of_uneven_ones_and_of_unknown_ones():
    assert find_node_links(run_of(hosts=("a", "a", "a", "a"))) is None
    assert find_node_links(run_of(hosts=("a", "a", "a", "b"))) is None
    assert find_node_links(run_of(hosts=("a", "b", "c", "d"))) is None
    assert find_node_links(run_of(hosts=("a", "a", "b"))) is None


def test_nothing_is_said_of_nodes_whose_ranks_are_no_neighbours():
    assert find_node_links(run_of(hosts=("a", "b", "a", "b"))) is None
