"""Assign the ranks of a run to nodes, from the recorded hosts or the emulated network."""

from collections.abc import Iterable
from itertools import groupby

from fsdp_inspect.trace.run import RunManifest, RunSource


def emulated_ranks_per_node(manifest: RunManifest) -> int | None:
    """Ranks on each emulated node; the last node may have fewer. None for runs not emulated."""
    size = manifest.emulation.get("gpus_per_node")
    return size if isinstance(size, int) and size > 0 else None


def emulated_latency_ns(manifest: RunManifest, ranks: Iterable[int]) -> float | None:
    """The latency of the emulated link of a group of ranks; None for runs not emulated."""
    size, emulation = emulated_ranks_per_node(manifest), manifest.emulation
    if size is None:
        return None
    crosses_nodes = len({rank // size for rank in ranks}) > 1
    link = (emulation.get("inter") if crosses_nodes else None) or emulation.get("intra")
    return None if link is None else float(link["latency_ns"])


def hosts_of(run: RunSource) -> dict[int, str]:
    """The node of each rank, by rank; ranks of an unknown node are missing."""
    size = emulated_ranks_per_node(run.manifest)
    if size is not None:
        return {rank: f"node {rank // size}" for rank in range(run.manifest.world_size)}
    return {record.rank: record.host for record in run.ranks if record.host}


def ranks_per_node(hosts: Iterable[str | None]) -> int | None:
    """Number of consecutive ranks on each node.

    Args:
        hosts: The node of each rank, in the order in which ranks form groups; None: unknown.

    Returns:
        None if a node is unknown, if nodes differ in size, or if the ranks of a node are not
        consecutive.
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    names = {host for host, _ in runs}
    sizes = {size for _, size in runs}
    is_known = None not in names and len(names) == len(runs)
    return sizes.pop() if is_known and len(sizes) == 1 else None
