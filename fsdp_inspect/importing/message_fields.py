"""Read the arguments of a trace's event: ids and the message of a communication."""

import json
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from fsdp_inspect.trace.limits import MAX_WORLD_SIZE

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
