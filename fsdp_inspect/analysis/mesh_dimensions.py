"""Look up the mesh dimension of each process group of a rank, and the place of each rank.

Runs of every version and imports have them: the labels that a rank recorded apply, otherwise those
that follow from the process groups of the manifest. See [Note: the dimension of a process group]
in `trace.mesh_dimensions`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.trace.mesh_dimensions import (
    DIMENSIONS,
    OTHER,
    UNKNOWN,
    WORLD,
    DimensionSource,
    MeshDimension,
    find_coordinates,
    find_dimensions,
    members_of,
    order_labels,
)
from fsdp_inspect.trace.run import GroupDimension, RankRecord, RunSource


@dataclass(frozen=True, slots=True)
class GroupDimensions:
    """The mesh dimensions of the process groups, by the group numbers of one rank."""

    by_group: Mapping[int, MeshDimension]

    def label(self, group: int) -> str:
        """The label of a group's dimension; `other` if it is unknown."""
        return self.by_group.get(group, UNKNOWN).label

    def by_label(self, groups: NDArray[np.integer]) -> dict[str, NDArray[np.int64]]:
        """Positions in a column by dimension of the group, with ordered labels."""
        distinct = np.unique(groups).tolist()
        labels = {group: self.label(group) for group in distinct}
        return {
            label: np.flatnonzero(
                np.isin(groups, [one for one in distinct if labels[one] == label])
            )
            for label in order_labels(labels.values())
        }

    def numbers(self, groups: NDArray[np.integer], labels: Sequence[str]) -> NDArray[np.int64]:
        """The position in `labels` of each group's dimension, for a column of groups."""
        found = np.zeros(len(groups), dtype=np.int64)
        for label, positions in self.by_label(groups).items():
            found[positions] = labels.index(label)
        return found

    def names(self, groups: NDArray[np.integer]) -> tuple[str, ...]:
        """The names of the dimensions of these groups in the `DeviceMesh`."""
        named = (self.by_group.get(group, UNKNOWN).name for group in np.unique(groups).tolist())
        return tuple(dict.fromkeys(filter(None, named)))

    def is_inferred(self, groups: NDArray[np.integer]) -> bool:
        """Whether the dimension of any of these groups is inferred."""
        distinct = np.unique(groups).tolist()
        return any(self.by_group.get(group, UNKNOWN).is_inferred for group in distinct)


def group_dimensions(run: RunSource, rank: int) -> GroupDimensions:
    """Return the dimensions of the process groups of a rank."""
    described = _described(run)
    record = remember(run, "rank records", partial(_records, run)).get(rank)
    if record is None or not record.group_dimensions:
        return GroupDimensions(described)
    return GroupDimensions(dict(enumerate(map(_recorded, record.group_dimensions))))


def _described(run: RunSource) -> dict[int, MeshDimension]:
    """The dimensions of the process groups of the manifest."""
    manifest = run.manifest
    return remember(
        run,
        "mesh dimensions",
        lambda: find_dimensions(manifest.process_groups, manifest.world_size),
    )


def _records(run: RunSource) -> dict[int, RankRecord]:
    return {record.rank: record for record in run.ranks}


def _recorded(group: GroupDimension) -> MeshDimension:
    """The dimension that a rank recorded for a group."""
    if not group.parallelism:
        return UNKNOWN
    sources = {source.value: source for source in DimensionSource}
    source = sources.get(group.parallelism_from, DimensionSource.RANKS)
    return MeshDimension(group.parallelism, group.dimension, source)


def rank_coordinates(run: RunSource, rank: int) -> dict[str, int]:
    """Return the place of a rank along each dimension of the mesh, by label."""
    record = remember(run, "rank records", partial(_records, run)).get(rank)
    if record is not None and record.coordinates:
        return record.coordinates
    manifest, described = run.manifest, _described(run)
    return remember(
        run,
        ("coordinates", rank),
        lambda: find_coordinates(manifest.process_groups, rank, manifest.world_size, described),
    )


def dimension_members(run: RunSource, label: str, rank: int) -> tuple[int, ...]:
    """Return the ranks with which a rank communicates along a dimension of the mesh.

    Returns:
        Global ranks, including the rank; empty if unknown. If there are several groups, the largest
        counts.
    """
    manifest = run.manifest
    described = _described(run)
    groups = (
        members_of(group.ranks, rank, manifest.world_size)
        for group in manifest.process_groups
        if described[group.index].label == label and group.are_ranks_known
    )
    return max(groups, key=len, default=())


# --- Name the sets of ranks that share a place: a node, a pipeline stage, a TP group.
#
# A rank has a place along each dimension of the mesh, a node and a local rank. The ranks of one
# place form a set, and so do the ranks of one process group of a dimension.

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
