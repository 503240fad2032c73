"""Number the units and process groups of a trace, and of all traces of an import."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.messages import GroupKey, GroupNames
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.mesh_dimensions import usual_dimension, with_labels
from fsdp_inspect.trace.run import ProcessGroup, Unit
from fsdp_inspect.trace.tables import EventTable

MAX_UNITS = 30_000
MAX_GROUPS = 30_000

MESH_PREFIX = "mesh_"
"""The start of the description of a process group that a `DeviceMesh` made."""

_ITEMSIZE_OF_UNKNOWN = 1


@dataclass
class RunNames:
    """Indices for names, in the order of their first occurrence over the ranks."""

    units: dict[str, int] = field(default_factory=dict)
    groups: dict[GroupKey, int] = field(default_factory=dict)
    _ranks: dict[GroupKey, tuple[int, ...]] = field(default_factory=dict)

    def unit_index(self, unit: str) -> int:
        """The unit's index in the run.

        Raises:
            ImportingError: The trace has more units than a run can have.
        """
        if unit not in self.units and len(self.units) >= MAX_UNITS:
            raise ImportingError(
                f"The trace names more than {MAX_UNITS:,} FSDP units. Expected the units of one "
                "model. The trace is damaged or was edited: export it again."
            )
        return self.units.setdefault(unit, len(self.units))

    def group_index(self, key: GroupKey | None) -> int:
        """The group's index in the run; -1 if it is unknown or the run has too many groups."""
        if key is None or (key not in self.groups and len(self.groups) >= MAX_GROUPS):
            return -1
        return self.groups.setdefault(key, len(self.groups))

    def learn_ranks(self, groups: GroupNames) -> None:
        """Keep the ranks of groups from the first rank of the import that lists them."""
        for key in self.groups:
            self._ranks.setdefault(key, groups.ranks_of(key))

    def adopt(self, other: "RunNames") -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Add the names of a trace, which have indices of the trace.

        Returns:
            The run's index of each unit and of each group of the trace; -1: too many groups.

        Raises:
            ImportingError: The run has more units than a run can have.
        """
        units = tuple(self.unit_index(unit) for unit in other.units)
        groups = tuple(self.group_index(key) for key in other.groups)
        for key, ranks in other._ranks.items():
            self._ranks.setdefault(key, ranks)
        return units, groups

    def process_groups(
        self, roles: Mapping[int, str], *, world_size: int, has_ranges: bool
    ) -> list[ProcessGroup]:
        """All groups; the ranks of a group with an abbreviated list are numbered from 0.

        Args:
            roles: The role of each group that FSDP uses, by index.
            world_size: The number of ranks of the run.
            has_ranges: Whether FSDP2's own ranges show which collectives are FSDP's.
        """
        groups = []
        for key, index in self.groups.items():
            ranks = self._ranks.get(key)
            is_all = key.size == world_size
            groups.append(
                ProcessGroup(
                    index=index,
                    name=key.name,
                    ranks=list(ranks or range(key.size)),
                    role=roles.get(index, "other"),
                    dimension=dimension_name(key.name),
                    is_name_inferred=not key.name.startswith(MESH_PREFIX),
                    is_role_inferred=index in roles and not has_ranges,
                    are_ranks_known=bool(ranks) or is_all,
                )
            )
        return with_labels(groups, world_size)

    @property
    def group_names(self) -> list[str]:
        """The names of all groups, by index."""
        return [key.name for key in self.groups]

    def size_of(self, group: int) -> int | None:
        """The number of ranks of a group; None if unknown."""
        sizes = {index: key.size for key, index in self.groups.items()}
        return sizes.get(group) or None

    @property
    def largest_group(self) -> int:
        """The number of ranks of the largest group; 0 without a group of known size."""
        return max((key.size for key in self.groups), default=0)

    @property
    def unlisted(self) -> tuple[str, ...]:
        """Names of the groups of known size whose ranks no trace lists."""
        return tuple(key.name for key in self.groups if key.size and not self._ranks.get(key))


def dimension_name(group_name: str) -> str:
    """The name of a mesh dimension in the description of a process group; empty: none.

    `DeviceMesh` describes the group of its dimension `tp` as `mesh_tp`, and the group of an unnamed
    dimension as `mesh_dim_1`. Other frameworks have names such as `TENSOR_MODEL_PARALLEL_GROUP`.
    """
    name = group_name.removeprefix(MESH_PREFIX)
    if name != group_name:
        return "" if name == "default" or name.startswith("dim_") else name
    return group_name if usual_dimension(group_name) is not None else ""


def find_roles(events: EventTable) -> dict[int, str]:
    """The roles of the groups of a rank, from FSDP's collectives in them."""
    of_unit = (events.unit != NO_UNIT) & (events.group >= 0)
    roles: dict[int, str] = {}
    for kind, role in (
        (EventKind.ALL_REDUCE, "replicate"),
        (EventKind.ALL_GATHER, "shard"),
        (EventKind.REDUCE_SCATTER, "shard"),
    ):
        for group in np.unique(events.group[of_unit & (events.kind == kind)]).tolist():
            roles[group] = role
    return roles


def describe_trace_units(names: RunNames, events: EventTable, *, origin: str) -> list[Unit]:
    """Describe the units of a trace from its collectives.

    Args:
        names: The units of the trace.
        events: The collectives.
        origin: The `recorded_by` of the units.

    Returns:
        All units. Numbers of parameters include the padding, as messages do. They may be 0 if the
        size of a message is unknown (`Unit.are_sizes_known`). The shard size is 0 if the group is
        unknown.
    """
    return [_describe(fqn, index, events, names, origin) for fqn, index in names.units.items()]


def _describe(fqn: str, index: int, events: EventTable, names: RunNames, origin: str) -> Unit:
    own = events.where(events.unit == index)
    gathers = own.where(own.kind == EventKind.ALL_GATHER)
    reductions = own.where(np.isin(own.kind, (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)))
    gathered, reduced = _largest(gathers), _largest(reductions)
    group = int(gathers.group[0]) if len(gathers) else -1
    size = names.size_of(group)
    reduce_group = own.where(own.kind == EventKind.ALL_REDUCE).group
    param_dtype, reduce_dtype = _dtype(gathers), _dtype(reductions)
    count = gathered // _itemsize(param_dtype) or reduced // _itemsize(reduce_dtype)
    plain = fqn.partition(" [pg=")[0]
    return Unit(
        index=index,
        fqn=fqn,
        modules=plain.split(", "),
        num_parameters=count,
        num_trainable_parameters=count if len(reductions) else 0,
        unsharded_bytes=gathered,
        sharded_bytes=gathered // size if size else 0,
        reduce_bytes=reduced,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=_reshards(gathers, reductions),
        shard_group=group,
        replicate_group=int(reduce_group[0]) if len(reduce_group) else -1,
        is_root=fqn == "",
        are_sizes_known=not np.any(np.concatenate([gathers.bytes, reductions.bytes]) < 0),
        execution_index=index,
        recorded_by=origin,
    )


def _largest(events: EventTable) -> int:
    return max(int(events.bytes.max(initial=0)), 0)


def _dtype(events: EventTable) -> str:
    return DTYPES[int(events.dtype[0])] if len(events) else DTYPES[0]


def _itemsize(dtype: str) -> int:
    return ITEMSIZE.get(dtype, _ITEMSIZE_OF_UNKNOWN)


def _reshards(gathers: EventTable, reductions: EventTable) -> bool | None:
    """Whether the unit is gathered again in backward; None without a backward in the trace."""
    if len(gathers) == 0 or len(reductions) == 0:
        return None
    return bool(np.any(gathers.phase == Phase.BACKWARD))
