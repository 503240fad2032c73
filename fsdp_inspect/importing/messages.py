"""Convert a trace's names of collectives, dtypes and process groups to the codes of a run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, EventKind
from fsdp_inspect.trace.records import MAX_WORLD_SIZE

# --- Read the arguments of a trace's event: ids and the message of a communication.

NOTHING = -1
"""The value of a missing id, thread or size."""

MAX_ID = 1 << 62
"""Larger ids and counts are invalid and count as missing."""


_MAX_KNOWN = 10_000
_MESSAGE_FIELDS = attrgetter(
    "collective",
    "in_elements",
    "out_elements",
    "dtype",
    "group_size",
    "group_name",
    "group_description",
    "group_ranks",
)


class EventArguments(msgspec.Struct, gc=False):
    """The arguments of an event. Each field may be missing or have another type."""

    correlation: Any = NOTHING
    external: Any = msgspec.field(default=NOTHING, name="External id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


@dataclass(frozen=True, slots=True)
class CollectiveMessage:
    """The message of one communication in an event's arguments; None for unknown fields."""

    collective: str | None = None
    elements: int | None = None
    """Elements of the full message: the larger of input and output."""
    sent_elements: int | None = None
    """Elements of the input."""
    dtype: str | None = None
    """The dtype in torch's spelling: `BFloat16`, `c10::BFloat16`, `float`."""
    group_size: int | None = None
    group_name: str | None = None
    group_description: str | None = None
    group_ranks: tuple[int, ...] | None = None
    """Also None if the trace abbreviates the list."""
    input_elements: tuple[int, ...] = ()
    """Elements of the first input tensors of a host operator (`Input Dims`)."""


class MessageReader:
    """Read messages. A trace has many equal messages, and each of them is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], CollectiveMessage] = {}

    def read(self, arguments: EventArguments) -> CollectiveMessage:
        """Read the message of a communication from an event's arguments."""
        key = (*_MESSAGE_FIELDS(arguments), bytes(arguments.dims), bytes(arguments.types))
        try:
            known = self._known.get(key)
        except TypeError:  # a field is a list, which torch never writes
            return read_message(arguments)
        if known is None:
            known = read_message(arguments)
            if len(self._known) < _MAX_KNOWN:
                self._known[key] = known
        return known


def read_message(arguments: EventArguments) -> CollectiveMessage:
    """Read the message of a communication from an event's arguments."""
    sizes = [read_whole(one) for one in (arguments.in_elements, arguments.out_elements)]
    known = [size for size in sizes if size is not None]
    dims, types = _decode_raw(arguments.dims), _decode_raw(arguments.types)
    return CollectiveMessage(
        collective=_text(arguments.collective),
        elements=max(known) if known else None,
        sent_elements=sizes[0],
        dtype=_text(arguments.dtype) or _first_dtype(types),
        group_size=read_num_ranks(arguments.group_size),
        group_name=_text(arguments.group_name),
        group_description=_text(arguments.group_description),
        group_ranks=read_ranks(arguments.group_ranks),
        input_elements=_element_counts(dims),
    )


def read_whole(value: Any) -> int | None:
    """Read a non-negative integer, also from text; None for all other values."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return value if isinstance(value, int) and 0 <= value < MAX_ID else None


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int)) and str(value) else None


def read_num_ranks(value: Any) -> int | None:
    """Read a number of ranks; None above the limit of a run and for all other values."""
    number = read_whole(value)
    return None if number is None or number > MAX_WORLD_SIZE else number


def read_ranks(value: Any) -> tuple[int, ...] | None:
    """Read a list of ranks or its text, such as `[0, 1]`; None for `[0, 1, ..., 63]`."""
    if isinstance(value, str):
        return _ranks_in(value)
    if not isinstance(value, list):
        return None
    ranks = [one for one in map(read_whole, value) if one is not None and one < MAX_WORLD_SIZE]
    return tuple(ranks) if len(ranks) == len(value) else None


@lru_cache(maxsize=256)
def _ranks_in(text: str) -> tuple[int, ...] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read_ranks(value) if isinstance(value, list) else None


def _decode_raw(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if bytes(raw) else None
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _first_dtype(types: Any) -> str | None:
    if not isinstance(types, list):
        return None
    named = [one for one in types if isinstance(one, str) and one]
    return named[0] if named else None


def _element_counts(dims: Any) -> tuple[int, ...]:
    """Elements of the first two inputs; a list of tensors gives their sum."""
    if not isinstance(dims, list):
        return ()
    return tuple(_count_elements(one) for one in dims[:2])


def _count_elements(shape: Any) -> int:
    if not isinstance(shape, list):
        return 0
    if any(isinstance(one, list) for one in shape):
        return sum(_count_elements(one) if one else 1 for one in shape)  # a scalar's shape is []
    sizes = [read_whole(one) for one in shape]
    if not sizes or None in sizes:
        return 0
    count = 1
    for size in sizes:
        count *= size or 0
    return min(count, MAX_ID)


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
