"""Find shard groups that cross nodes, and measure their bandwidth across and within nodes.

There is no result if the node of a rank is unknown (`trace.nodes`).
"""

from fsdp_inspect.advice.evidence import NodeLinks
from fsdp_inspect.analysis.bandwidth import KindBandwidth, measure_bandwidth
from fsdp_inspect.formatting import format_count
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.nodes import hosts_of, ranks_per_node
from fsdp_inspect.trace.run import ProcessGroup, RunSource


def find_node_links(run: RunSource) -> NodeLinks | None:
    """The shard group that crosses nodes, with its bandwidth across and within nodes.

    Returns:
        None if no shard group with all-gathers crosses nodes, if its ranks are not spread evenly
        over consecutive ranks of each node, or if their nodes or the bandwidth are unknown.
    """
    nodes = hosts_of(run)
    shards = [group for group in run.manifest.process_groups if group.role == "shard"]
    spread = {group.index: _spread(group, nodes) for group in shards}
    if not any(spread.values()):
        return None
    bandwidth = measure_bandwidth(run)
    kinds = bandwidth.kinds if bandwidth is not None else ()
    for kind in kinds:
        place = spread.get(kind.group) if kind.group is not None else None
        if place and kind.kind == EventKind.ALL_GATHER.label and kind.bus_bytes_per_s:
            within, source = _within(run, kinds, nodes)
            num_nodes, ranks_per_node = place
            return NodeLinks(num_nodes, ranks_per_node, kind.bus_bytes_per_s, within, source)
    return None


def _spread(group: ProcessGroup, nodes: dict[int, str]) -> tuple[int, int] | None:
    """Nodes of a group and ranks on each; None: one node, one rank a node, or unknown."""
    size = ranks_per_node(nodes.get(rank) for rank in group.ranks)
    if size is None or size in (1, len(group.ranks)):
        return None
    return len(group.ranks) // size, size


def _within(
    run: RunSource, kinds: tuple[KindBandwidth, ...], nodes: dict[int, str]
) -> tuple[float | None, str]:
    """The bandwidth within a node, emulated or the fastest measured, and its source."""
    link = run.manifest.emulation.get("intra")
    if isinstance(link, dict):
        return float(link["bandwidth_bytes_per_s"]), "the emulated link"
    groups = {group.index: group for group in run.manifest.process_groups}
    known = [
        (kind.bus_bytes_per_s, kind)
        for kind in kinds
        if kind.bus_bytes_per_s and kind.group is not None and _is_inside(groups[kind.group], nodes)
    ]
    if known:
        fastest, kind = max(known, key=lambda pair: pair[0])
        what = kind.kind.replace("_", "-")
        return fastest, f"measured: {format_count(kind.num_events)} {what}s of {kind.group_size}"
    return None, ""


def _is_inside(group: ProcessGroup, nodes: dict[int, str]) -> bool:
    places = {nodes.get(rank, "") for rank in group.ranks}
    return len(group.ranks) > 1 and len(places) == 1 and "" not in places
