"""Which units and process groups does the run have? Numbered alike on every rank."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.messages import GroupKey, GroupNames
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.run import ProcessGroup, Unit
from fsdp_inspect.trace.tables import EventTable

MAX_UNITS = 30_000
MAX_GROUPS = 30_000

_ITEMSIZE_OF_UNKNOWN = 1


@dataclass
class RunNames:
    """Numbers for names, in the order in which the ranks bring them."""

    units: dict[str, int] = field(default_factory=dict)
    groups: dict[GroupKey, int] = field(default_factory=dict)
    _ranks: dict[GroupKey, tuple[int, ...]] = field(default_factory=dict)

    def unit_index(self, unit: str) -> int:
        """The unit's number in the run.

        Raises:
            ImportingError: There are more units than a run can have.
        """
        if unit not in self.units and len(self.units) >= MAX_UNITS:
            raise ImportingError(
                f"The trace names more than {MAX_UNITS:,} FSDP units. Expected those of one model. "
                "The trace is damaged, or was edited: export it again."
            )
        return self.units.setdefault(unit, len(self.units))

    def group_index(self, key: GroupKey | None) -> int:
        """The group's number in the run; -1 for an unknown one, and beyond what a run can have."""
        if key is None or (key not in self.groups and len(self.groups) >= MAX_GROUPS):
            return -1
        return self.groups.setdefault(key, len(self.groups))

    def learn_ranks(self, groups: GroupNames) -> None:
        """Keep the members of groups as the first rank of the import knows them."""
        for key in self.groups:
            self._ranks.setdefault(key, groups.ranks_of(key))

    def process_groups(self, roles: Mapping[int, str]) -> list[ProcessGroup]:
        """All groups; a group whose list is abbreviated counts its ranks from 0."""
        return [
            ProcessGroup(
                index=index,
                name=key.name,
                ranks=list(self._ranks.get(key) or range(key.size)),
                role=roles.get(index, "other"),
            )
            for key, index in self.groups.items()
        ]

    def size_of(self, group: int) -> int | None:
        """How many ranks a group has; None if unknown."""
        sizes = {index: key.size for key, index in self.groups.items()}
        return sizes.get(group) or None

    @property
    def largest_group(self) -> int:
        """Ranks of the largest group; 0 without a group whose size is known."""
        return max((key.size for key in self.groups), default=0)

    @property
    def unlisted(self) -> tuple[str, ...]:
        """Names of the groups whose ranks no trace lists, though it says how many they are."""
        return tuple(key.name for key in self.groups if key.size and not self._ranks.get(key))


def find_roles(events: EventTable) -> dict[int, str]:
    """What the groups of a rank are for, by what FSDP does in them."""
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


def describe_trace_units(
    names: RunNames, events: EventTable, *, origin: str, known: Iterable[Unit] = ()
) -> list[Unit]:
    """What a trace tells about the units, from the collectives of one rank.

    Args:
        names: The run's units.
        events: Collectives of a rank.
        origin: The `recorded_by` of the units.
        known: Units that another rank has described; kept as they are.

    Returns:
        Every unit of the run. Numbers of parameters count the padding, as messages do; where the
        size of a message is not known, they may be 0 (`Unit.are_sizes_known`). Where the group is
        not known, neither is a rank's share of a unit: 0.
    """
    described = {unit.index: unit for unit in known if unit.unsharded_bytes or unit.reduce_bytes}
    return [
        described.get(index) or _describe(fqn, index, events, names, origin)
        for fqn, index in names.units.items()
    ]


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
    """Whether it is gathered again in backward; None if no backward was seen."""
    if len(gathers) == 0 or len(reductions) == 0:
        return None
    return bool(np.any(gathers.phase == Phase.BACKWARD))
