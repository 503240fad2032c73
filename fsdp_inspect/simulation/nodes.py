"""Find the ranks that share a node, and the cost line of groups within a node.

With an integer `reshard_after_forward`, groups of consecutive ranks gather in backward. A run
without such groups shows their link only in two cases: all ranks of the shard group share a node,
or the network is emulated.
"""

import math
from collections.abc import Sequence

from fsdp_inspect.analysis.link_fit import fit_link
from fsdp_inspect.simulation.network import UNKNOWN_NODE, CostLine, KnownLine, Network, Node
from fsdp_inspect.trace.bus_bandwidth import bus_factor
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.nodes import (
    emulated_latency_ns,
    emulated_ranks_per_node,
    hosts_of,
    ranks_per_node,
)
from fsdp_inspect.trace.run import RunManifest, RunSource


def find_node(run: RunSource, network: Network, shard_ranks: Sequence[int]) -> Node:
    """The node properties that the run shows.

    Args:
        run: A recorded or emulated run.
        network: The network fitted to the run's collectives.
        shard_ranks: The ranks of one shard group.
    """
    size = emulated_ranks_per_node(run.manifest) or _recorded_size(run)
    if size is None:
        return UNKNOWN_NODE
    is_whole_group = len({rank // size for rank in shard_ranks}) < 2
    line, source = _emulated_line(run.manifest), ""
    if line is None and is_whole_group:
        line = network.lines.get(EventKind.ALL_GATHER)
        source = "the shard group, which lies within a node"
    within = [measured for measured in network.smaller if size % measured == 0]
    if line is None and within:
        line = network.smaller[max(within)]
        source = f"the run's groups of {max(within)} ranks within a node"
    return Node(size, line, source)


def known_lines(run: RunSource) -> KnownLine:
    """The lines of the run's process groups that its own collectives do not show.

    An emulated network states its latency. A probe measures messages of many sizes. On a busy
    machine its durations can scatter too much to show a latency. The fit of the line then has a
    refusal.
    """
    probe = run.network_probe

    def find(kind: EventKind, ranks: Sequence[int]) -> CostLine | None:
        latency_ns = emulated_latency_ns(run.manifest, ranks)
        if latency_ns is not None:
            return CostLine(latency_ns, math.inf, source="the emulated network")
        if probe is None:
            return None
        messages, durations = probe.durations_of(kind, ranks)
        fit = fit_link(messages, durations, bus_factor(kind, len(ranks)))
        if fit is None:
            return None
        source = "the network probe of the run"
        return CostLine(fit.latency_ns, fit.bus_bytes_per_s, fit, source=source)

    return find


def _emulated_line(manifest: RunManifest) -> CostLine | None:
    """The emulated link within a node, which is valid for any group there."""
    link = manifest.emulation.get("intra")
    return None if link is None else CostLine(link["latency_ns"], link["bandwidth_bytes_per_s"])


def _recorded_size(run: RunSource) -> int | None:
    """Ranks on each host, if all hosts are known and have equally many consecutive ranks."""
    hosts = hosts_of(run)
    return ranks_per_node(hosts.get(rank) for rank in range(run.manifest.world_size))
