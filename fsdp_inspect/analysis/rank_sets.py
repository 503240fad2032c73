"""Name the sets of ranks that share a place: a node, a pipeline stage, a TP group.

A rank has a place along each dimension of the mesh, a node and a local rank. The ranks of one place
form a set, and so do the ranks of one process group of a dimension.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.mesh_dimensions import dimension_members, rank_coordinates
from fsdp_inspect.trace.mesh_dimensions import DIMENSIONS, OTHER, WORLD, order_labels
from fsdp_inspect.trace.run import RunSource

NODE, LOCAL_RANK = "node", "local rank"
"""Dimensions of the machines, in addition to those of the mesh."""
STAGES = "pp"
_DATA_PARALLEL = frozenset({"replicate", "shard", WORLD, OTHER})
"""Dimensions whose groups have no name of their own: the coordinates name these ranks better."""


def list_axes(run: RunSource) -> list[str]:
    """Return the dimensions along which ranks can be laid out, outermost first.

    A dimension with one place is left out. The local rank remains if no dimension is left.
    """
    places = rank_places(run)
    known = {axis for found in places.values() for axis in found}
    ordered = [STAGES, *(one for one in order_labels(known) if one != STAGES), NODE, LOCAL_RANK]
    spread = [
        axis
        for axis in dict.fromkeys(ordered)
        if len({found[axis] for found in places.values() if axis in found}) > 1
    ]
    return spread or [LOCAL_RANK]


def rank_places(run: RunSource) -> dict[int, dict[str, str]]:
    """Return the place of each recorded rank along every dimension."""
    return remember(run, "places of ranks", partial(_measure_places, run))


def _measure_places(run: RunSource) -> dict[int, dict[str, str]]:
    return {
        record.rank: {
            **{axis: str(place) for axis, place in rank_coordinates(run, record.rank).items()},
            NODE: record.host,
            LOCAL_RANK: str(record.local_rank),
        }
        for record in run.ranks
    }


def name_rank_sets(run: RunSource, ranks: Collection[int]) -> dict[frozenset[int], tuple[str, ...]]:
    """Return the sets of these ranks with all names of each set, the plainest name first.

    Stages and nodes come first, then process groups (`tp group of rank 4`), then the places along
    other dimensions (`shard 1`).
    """
    names: dict[frozenset[int], list[str]] = {}
    axes = [axis for axis in list_axes(run) if axis != LOCAL_RANK]
    whole = [axis for axis in axes if axis in (STAGES, NODE)]
    places = rank_places(run)
    for name, members in (
        *_by_place(places, whole, ranks),
        *_by_group(run, ranks),
        *_by_place(places, [axis for axis in axes if axis not in whole], ranks),
    ):
        if members:
            names.setdefault(members, []).append(name)
    return {members: tuple(known) for members, known in names.items()}


def _by_place(
    places: Mapping[int, Mapping[str, str]], axes: Collection[str], ranks: Collection[int]
) -> Iterator[tuple[str, frozenset[int]]]:
    for axis in axes:
        members: dict[str, list[int]] = {}
        for rank in ranks:
            if axis in places.get(rank, {}):
                members.setdefault(places[rank][axis], []).append(rank)
        for place in sorted(members):
            yield f"{axis} {place}", frozenset(members[place])


def _by_group(run: RunSource, ranks: Collection[int]) -> Iterator[tuple[str, frozenset[int]]]:
    own = {axis for rank in ranks for axis in rank_coordinates(run, rank)}
    for label in order_labels({*DIMENSIONS, *own} - _DATA_PARALLEL):
        for rank in sorted(ranks):
            members = dimension_members(run, label, rank)
            if len(members) > 1 and members[0] == rank:
                yield f"{label} group of rank {rank}", frozenset(members).intersection(ranks)
