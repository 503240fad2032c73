"""Look up the mesh dimension of each process group of a rank, and the place of each rank.

Runs of every version and imports have them: the labels that a rank recorded apply, otherwise those
that follow from the process groups of the manifest. See [Note: the dimension of a process group]
in `trace.mesh_dimensions`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.trace.mesh_dimensions import (
    UNKNOWN,
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
