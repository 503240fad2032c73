"""Assign each process group of a run to one dimension of the device mesh.

[Note: the dimension of a process group] A process group has one dimension. The first source that
applies decides:

1. The sharder: the group of a unit's all-gather and reduce-scatter is `shard`, the group of its
   all-reduce across replicas is `replicate`.
2. The name of the dimension in the `DeviceMesh`, or of the process group in an import, if it is a
   usual name of one of `DIMENSIONS` (`dp_replicate`, `tensor`).
3. The group has all ranks: `world`.
4. The sharder uses another group of this name and these ranks: the dimension of that group.
5. Any other name in the `DeviceMesh` stays as it is.
6. The group has the same ranks as groups of exactly one other dimension: that dimension, inferred.

Otherwise the dimension is unknown. One communicator may serve two purposes: a mesh of one dimension
uses the process group of the world. All its collectives count for the first of these rules.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from fsdp_inspect.trace.run import ProcessGroup

DIMENSIONS = ("replicate", "shard", "cp", "tp", "ep", "pp")
"""The dimensions with a defined meaning."""
WORLD = "world"
"""The label of groups with all ranks."""
OTHER = "other"
"""The label of groups whose dimension is unknown."""


class DimensionSource(StrEnum):
    """The reason for a group's dimension; see [Note: the dimension of a process group]."""

    SHARDER = "sharder"
    MESH = "mesh"
    ORDER = "order"
    """Imports without FSDP's ranges: the order and the sizes of collectives."""
    NAME = "name"
    """Imports: the name of the process group."""
    ALL_RANKS = "all_ranks"
    RANKS = "ranks"
    UNKNOWN = ""


_INFERRED = (DimensionSource.ORDER, DimensionSource.NAME, DimensionSource.RANKS)
_OF_ROLE = {"shard": "shard", "post_forward": "shard", "replicate": "replicate"}
_USUAL_NAMES = {
    **dict.fromkeys(("replicate", "replica", "replicas", "ddp", "dp_replicate"), "replicate"),
    **dict.fromkeys(("shard", "fsdp", "dp_shard", "efsdp", "zero"), "shard"),
    **dict.fromkeys(("cp", "context"), "cp"),
    **dict.fromkeys(("tp", "tensor"), "tp"),
    **dict.fromkeys(("ep", "expert", "experts"), "ep"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage", "stages"), "pp"),
    "world": WORLD,
}
"""The usual names without prefixes. `dp` and `data` are missing, because they name both sharded and
replicated data."""
_NOT_LETTERS = re.compile(r"[^a-z0-9]+")
_ENDINGS = ("_group", "_parallel", "_model", "_parallelism")


@dataclass(frozen=True, slots=True)
class MeshDimension:
    """The dimension of a process group."""

    label: str
    """One of `DIMENSIONS`, `WORLD`, the user's own name, or `OTHER`."""
    name: str = ""
    """The name in the `DeviceMesh`; empty: it has none."""
    source: DimensionSource = DimensionSource.UNKNOWN

    @property
    def is_inferred(self) -> bool:
        """Whether the dimension is inferred: neither a mesh nor a sharder states it."""
        return self.source in _INFERRED


UNKNOWN = MeshDimension(OTHER)
"""The dimension of a group without any evidence."""


def usual_dimension(name: str) -> str | None:
    """The dimension that a name usually means: `TENSOR_MODEL_PARALLEL_GROUP` is `tp`; else None."""
    plain = _NOT_LETTERS.sub("_", name.lower()).strip("_").removeprefix("mesh_")
    for ending in _ENDINGS * 2:
        plain = plain.removesuffix(ending)
    return _USUAL_NAMES.get(plain)


def find_dimensions(groups: Sequence[ProcessGroup], world_size: int) -> dict[int, MeshDimension]:
    """Find the dimension of each process group, by index.

    Args:
        groups: The process groups of one rank, recorded by any version.
        world_size: The number of ranks of the run.
    """
    of_sharder = {
        (group.dimension, tuple(group.ranks)): _OF_ROLE[group.role]
        for group in groups
        if group.role in _OF_ROLE
    }
    stated = {
        group.index: _stated_dimension(
            group, world_size, of_sharder.get((group.dimension, tuple(group.ranks)))
        )
        for group in groups
    }
    by_ranks: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for group in groups:
        if (known := stated[group.index]) is not None and group.are_ranks_known:
            by_ranks[tuple(sorted(group.ranks))].add(known.label)
    found = {}
    for group in groups:
        labels = by_ranks[tuple(sorted(group.ranks))]
        inferred = UNKNOWN
        if len(labels) == 1 and group.are_ranks_known:
            inferred = MeshDimension(min(labels), "", DimensionSource.RANKS)
        found[group.index] = stated[group.index] or inferred
    return found


def _stated_dimension(
    group: ProcessGroup, world_size: int, alike: str | None
) -> MeshDimension | None:
    """The dimension by all rules of the note except the last; None if none applies.

    Args:
        group: A process group.
        world_size: The number of ranks of the run.
        alike: The dimension of a group of the sharder with the same name and ranks.
    """
    name = group.dimension
    of_role = _OF_ROLE.get(group.role)
    if of_role is not None:
        return MeshDimension(
            of_role,
            name,
            DimensionSource.ORDER if group.is_role_inferred else DimensionSource.SHARDER,
        )
    source = DimensionSource.NAME if group.is_name_inferred else DimensionSource.MESH
    usual = usual_dimension(name)
    if usual is not None:
        return MeshDimension(usual, name, source)
    if (
        group.are_ranks_known
        and len(group.ranks) == world_size
        and set(group.ranks) == set(range(world_size))
    ):
        return MeshDimension(WORLD, name, DimensionSource.ALL_RANKS)
    return MeshDimension(alike or name, name, source) if name else None


def with_labels(groups: Sequence[ProcessGroup], world_size: int) -> list[ProcessGroup]:
    """The groups with their labels, as the run folder stores them."""
    found = find_dimensions(groups, world_size)
    return [
        group.model_copy(
            update={
                "parallelism": "" if found[group.index] == UNKNOWN else found[group.index].label,
                "parallelism_from": found[group.index].source.value,
            }
        )
        for group in groups
    ]


def order_labels(labels: Iterable[str]) -> list[str]:
    """Distinct labels: the known dimensions first, then own names, `world` and `other` last."""
    distinct = set(labels)
    own = sorted(distinct - {*DIMENSIONS, WORLD, OTHER})
    return [one for one in (*DIMENSIONS, *own, WORLD, OTHER) if one in distinct]


def members_of(ranks: Sequence[int], rank: int, world_size: int) -> tuple[int, ...]:
    """The ranks that communicate with a rank along the dimension of a process group.

    Args:
        ranks: The ranks of one group of the dimension, in group order.
        rank: Any rank of the run.
        world_size: The number of ranks of the run.

    Returns:
        Global ranks, including the rank; empty if unknown: the rank is outside the group, and the
        group is not a dimension of a mesh.
    """
    if rank in ranks:
        return tuple(ranks)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    is_regular = stride > 0 and all(later - earlier == stride for earlier, later in pairwise(ranks))
    block = stride * len(ranks)
    if not is_regular or world_size % block or ranks[0] != _first_of(ranks[0], stride, len(ranks)):
        return ()
    first = _first_of(rank, stride, len(ranks))
    return tuple(range(first, first + block, stride))


def _first_of(rank: int, stride: int, size: int) -> int:
    """The first rank of the mesh dimension that contains a rank."""
    return rank - rank // stride % size * stride


def find_coordinates(
    groups: Sequence[ProcessGroup],
    rank: int,
    world_size: int,
    dimensions: Mapping[int, MeshDimension] | None = None,
) -> dict[str, int]:
    """The place of a rank along each dimension, by label.

    Args:
        groups: The process groups of one rank.
        rank: Any rank of the run.
        world_size: The number of ranks of the run.
        dimensions: The result of `find_dimensions`, if it is known.

    If a dimension has several groups, the largest counts. `world` and `other` are not dimensions of
    a mesh. A dimension is absent if the ranks of its groups are not a regular grid and the given
    groups belong to another rank.
    """
    found = find_dimensions(groups, world_size) if dimensions is None else dimensions
    places: dict[str, tuple[int, int]] = {}
    for group in groups:
        label = found[group.index].label
        members = members_of(group.ranks, rank, world_size)
        if label in (WORLD, OTHER) or not members or not group.are_ranks_known:
            continue
        if len(members) > places.get(label, (0, 0))[0]:
            places[label] = (len(members), members.index(rank))
    return {label: places[label][1] for label in order_labels(places)}
