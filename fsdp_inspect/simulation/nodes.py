"""Which of a run's ranks share a node, and how fast is a group within one?

Groups of neighbouring ranks gather in backward with an integer `reshard_after_forward`. A run that
had none tells their link only if all ranks that shard share a node, or if its network is emulated.
"""

from collections.abc import Sequence

from fsdp_inspect.simulation.network import UNKNOWN_NODE, CostLine, Network, Node
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.nodes import emulated_ranks_per_node, hosts_of, ranks_per_node
from fsdp_inspect.trace.run import RunManifest, RunSource


def find_node(run: RunSource, network: Network, shard_ranks: Sequence[int]) -> Node:
    """What the run tells of its nodes.

    Args:
        run: A recorded or emulated run.
        network: Fitted to its collectives.
        shard_ranks: The ranks of one group that shards.
    """
    size = emulated_ranks_per_node(run.manifest) or _recorded_size(run)
    if size is None:
        return UNKNOWN_NODE
    is_whole_group = len({rank // size for rank in shard_ranks}) < 2
    line, source = _emulated_line(run.manifest), ""
    if line is None and is_whole_group:
        line = network.lines.get(EventKind.ALL_GATHER)
        source = "all ranks that shard: they share a node"
    within = [measured for measured in network.smaller if size % measured == 0]
    if line is None and within:
        line = network.smaller[max(within)]
        source = f"the run's own groups of {max(within)}, in a node, too"
    return Node(size, line, source)


def _emulated_line(manifest: RunManifest) -> CostLine | None:
    """The emulated link within a node, which holds for any group there."""
    link = manifest.emulation.get("intra")
    return None if link is None else CostLine(link["latency_ns"], link["bandwidth_bytes_per_s"])


def _recorded_size(run: RunSource) -> int | None:
    """Ranks on each host, if all hosts are known and have as many neighbours each."""
    hosts = hosts_of(run)
    return ranks_per_node(hosts.get(rank) for rank in range(run.manifest.world_size))
