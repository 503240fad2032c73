"""Convert a trace's names of collectives, dtypes and process groups to the codes of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fsdp_inspect.importing.message_fields import (
    NOTHING,
    CollectiveMessage,
    read_num_ranks,
    read_ranks,
)
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, EventKind

_DTYPES = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "double": "float64",
    "byte": "uint8",
    "unsigned char": "uint8",
    "char": "int8",
    "signed char": "int8",
    "short": "int16",
    "short int": "int16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "bool": "bool",
    "complexfloat": "complex64",
}
"""Dtype names in torch's traces (ScalarType names and C++ types), in lower case."""

_UNKNOWN_DTYPE = 0
_NO_DESCRIPTION = frozenset({"", "undefined", "default_pg"})


@lru_cache(maxsize=256)
def dtype_code_of_name(name: str | None) -> int:
    """Index into `codes.DTYPES`; 0 if unknown."""
    plain = (name or "").lower().removeprefix("c10::")
    known = _DTYPES.get(plain, plain)
    return DTYPES.index(known) if known in DTYPES else _UNKNOWN_DTYPE


def message_bytes_of(message: CollectiveMessage, kind: EventKind) -> int:
    """Bytes of the full message; -1 if the trace does not contain its size.

    With metadata, the full message is the larger of input and output, and that of an all-to-all is
    its input: the bytes that the rank sends. Operators without metadata have only inputs, and the
    largest input is the message. An all-gather that lists only one rank's input counts it once for
    each rank of the group. `c10d::alltoall_base_` lists its output before its input.
    """
    code = dtype_code_of_name(message.dtype)
    if code == _UNKNOWN_DTYPE:
        return NOTHING
    size = ITEMSIZE[DTYPES[code]]
    is_exchange = kind is EventKind.ALL_TO_ALL
    if is_exchange and message.sent_elements is not None:
        return message.sent_elements * size
    if message.elements is not None:
        return message.elements * size
    inputs = [count for count in message.input_elements if count > 0]
    if not inputs:
        return NOTHING
    if is_exchange:
        return inputs[-1] * size
    largest = max(inputs)
    if kind is EventKind.ALL_GATHER and len(message.input_elements) < 2:
        return largest * message.group_size * size if message.group_size else NOTHING
    return largest * size


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key by which process groups of different ranks are one group of the run.

    Each rank has its own shard group with its own name. These groups share their size and the name
    of the mesh dimension, if there is one.
    """

    name: str
    size: int


@dataclass
class GroupNames:
    """The process groups of one rank, by the name that its messages use."""

    described: dict[str, tuple[GroupKey, tuple[int, ...]]] = field(default_factory=dict)
    world_size: int = 0
    only: GroupKey | None = None
    """The only group of the process, if the trace lists exactly one group."""

    @classmethod
    def of(cls, distributed: Mapping[str, Any]) -> "GroupNames":
        """Read the groups of `distributedInfo`, where each field may be missing."""
        groups = cls()
        groups.world_size = read_num_ranks(distributed.get("world_size")) or 0
        listed = distributed.get("pg_config")
        for one in listed if isinstance(listed, list) else []:
            if isinstance(one, dict) and isinstance(one.get("pg_name"), (str, int)):
                groups._add_listed(one)
        if len(groups.described) == 1 and distributed.get("pg_count", 1) == 1:
            groups.only = next(iter(groups.described.values()))[0]
        return groups

    def key_of(self, message: CollectiveMessage) -> GroupKey | None:
        """The group that a message names; the only one of the process if it names none."""
        if message.group_name is None:
            return self.only
        known = self.described.get(message.group_name)
        if known is None:
            self._add(
                message.group_name,
                message.group_description or "",
                message.group_ranks or (),
                message.group_size or 0,
            )
            known = self.described[message.group_name]
        return known[0]

    def ranks_of(self, key: GroupKey) -> tuple[int, ...]:
        """The group's ranks; empty if the trace abbreviates the list."""
        return next((ranks for one, ranks in self.described.values() if one == key), ())

    def _add_listed(self, one: Mapping[str, Any]) -> None:
        self._add(
            str(one["pg_name"]),
            str(one.get("pg_desc", "")),
            read_ranks(one.get("ranks")) or (),
            read_num_ranks(one.get("pg_size")) or 0,
        )

    def _add(self, name: str, description: str, ranks: tuple[int, ...], size: int) -> None:
        size = len(ranks) or size
        if not ranks and size and size == self.world_size:
            ranks = tuple(range(size))
        plain = name if description in _NO_DESCRIPTION else description
        self.described[name] = (GroupKey(plain, size), ranks)
