"""Do the all-gathers of units cross nodes, and how fast is the bus inside a node beside that?

Which node a rank is on is what it recorded as its host, or what the emulation says; where a rank
of the group is missing, nothing is said.
"""

from collections import Counter

from fsdp_inspect.advice.evidence import NodeLinks
from fsdp_inspect.analysis.bandwidth import KindBandwidth, measure_bandwidth
from fsdp_inspect.formatting import format_count
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import ProcessGroup, RunSource


def find_node_links(run: RunSource) -> NodeLinks | None:
    """The shard group that crosses nodes, with its speed and that of a node inside.

    Returns:
        None where no group of all-gathers crosses nodes, where its ranks are not spread evenly,
        or where their nodes or its bandwidth are not known.
    """
    nodes = _nodes(run)
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


def _nodes(run: RunSource) -> dict[int, str]:
    """The node of each rank that is known."""
    per_node = run.manifest.emulation.get("gpus_per_node")
    if run.manifest.source == "emulated" and isinstance(per_node, int) and per_node > 0:
        return {rank: f"node {rank // per_node}" for rank in range(run.manifest.world_size)}
    return {record.rank: record.host for record in run.ranks if record.host}


def _spread(group: ProcessGroup, nodes: dict[int, str]) -> tuple[int, int] | None:
    """Nodes of a group and ranks on each; None: one node, one rank a node, uneven, or unknown."""
    counts = Counter(nodes.get(rank, "") for rank in group.ranks)
    sizes = set(counts.values())
    if "" in counts or len(counts) < 2 or len(sizes) != 1 or sizes == {1}:
        return None
    return len(counts), sizes.pop()


def _within(
    run: RunSource, kinds: tuple[KindBandwidth, ...], nodes: dict[int, str]
) -> tuple[float | None, str]:
    """The fastest bus inside a node, and what tells it."""
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
    link = run.manifest.emulation.get("intra")
    if run.manifest.source == "emulated" and isinstance(link, dict):
        return float(link["bandwidth_bytes_per_s"]), "the emulation's own link"
    return None, ""


def _is_inside(group: ProcessGroup, nodes: dict[int, str]) -> bool:
    places = {nodes.get(rank, "") for rank in group.ranks}
    return len(group.ranks) > 1 and len(places) == 1 and "" not in places
