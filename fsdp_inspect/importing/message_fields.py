"""What do the arguments of a trace's event say? Ids, and the message of a communication."""

import json
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

NOTHING = -1
"""An id, a thread or a size that the event does not have."""

MAX_ID = 1 << 62
"""Ids and counts beyond this are none."""


_MAX_KNOWN = 10_000
_SAID = attrgetter(
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
    """Of an event; anything may be missing or of another type."""

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
    """What an event's arguments say about one communication; None where they say nothing."""

    collective: str | None = None
    elements: int | None = None
    """Of the larger of input and output: the full message."""
    dtype: str | None = None
    """As torch names it: `BFloat16`, `c10::BFloat16`, `float`."""
    group_size: int | None = None
    group_name: str | None = None
    group_description: str | None = None
    group_ranks: tuple[int, ...] | None = None
    """None also where the list is abbreviated."""
    input_elements: tuple[int, ...] = ()
    """Of the first tensors of a host operator (`Input Dims`)."""


class MessageReader:
    """Reads messages; equal ones, of which a trace has many, are read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], CollectiveMessage] = {}

    def read(self, arguments: EventArguments) -> CollectiveMessage:
        """What an event's arguments say about a communication."""
        key = (*_SAID(arguments), bytes(arguments.dims), bytes(arguments.types))
        try:
            known = self._known.get(key)
        except TypeError:  # something is a list, as no trace of torch's has it
            return read_message(arguments)
        if known is None:
            known = read_message(arguments)
            if len(self._known) < _MAX_KNOWN:
                self._known[key] = known
        return known


def read_message(arguments: EventArguments) -> CollectiveMessage:
    """What an event's arguments say about a communication."""
    sizes = [read_whole(one) for one in (arguments.in_elements, arguments.out_elements)]
    known = [size for size in sizes if size is not None]
    dims, types = _decode_raw(arguments.dims), _decode_raw(arguments.types)
    return CollectiveMessage(
        collective=_text(arguments.collective),
        elements=max(known) if known else None,
        dtype=_text(arguments.dtype) or _first_dtype(types),
        group_size=read_whole(arguments.group_size),
        group_name=_text(arguments.group_name),
        group_description=_text(arguments.group_description),
        group_ranks=_ranks(arguments.group_ranks),
        input_elements=_element_counts(dims),
    )


def read_whole(value: Any) -> int | None:
    """A whole number that is not negative, also as text; None for everything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return value if isinstance(value, int) and 0 <= value < MAX_ID else None


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int)) and str(value) else None


def _ranks(value: Any) -> tuple[int, ...] | None:
    """`[0, 1]`, as a list or as its text; None for `[0, 1, ..., 63]`."""
    if isinstance(value, str):
        return _ranks_in(value)
    if not isinstance(value, list):
        return None
    ranks = [read_whole(one) for one in value]
    return tuple(one for one in ranks if one is not None) if None not in ranks else None


@lru_cache(maxsize=256)
def _ranks_in(text: str) -> tuple[int, ...] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _ranks(value) if isinstance(value, list) else None


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
    """Elements of the first two inputs; a list of tensors counts as their sum."""
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
