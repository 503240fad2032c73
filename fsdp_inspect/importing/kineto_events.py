"""What does a torch.profiler trace hold, in columns? Kernels, launches, host events, names.

Only the fields that are needed are decoded, and only columns are kept: some 40 bytes for an event
that takes 300 in the file. Times are integer ns from the trace's own zero.

[Note: exact times] A trace writes µs with three decimals. As a float such a number is off by less
than half a nanosecond up to 2^43 µs, so the integer part and the fraction taken apart give the
nanosecond exactly; that is why Kineto writes times from a base time. Traces before it has one write
µs since 1970, which floats cannot tell to the nanosecond: those are decoded as decimals.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.json_events import EventReader
from fsdp_inspect.importing.trace_file import ImportLimits, OnProgress, read_blocks

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

NOTHING = -1
"""An id, a thread or a size that the event does not have."""

_EXACT_US = 2.0**43
_MAX_NS = 1 << 62


class Category(IntEnum):
    """What kind of complete event it is; all others are left out."""

    KERNEL = 0
    MEMORY_COPY = 1
    LAUNCH = 2
    OPERATOR = 3
    ANNOTATION = 4


_CATEGORIES = {
    "kernel": Category.KERNEL,
    "Kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMORY_COPY,
    "Memcpy": Category.MEMORY_COPY,
    "gpu_memset": Category.MEMORY_COPY,
    "Memset": Category.MEMORY_COPY,
    "cuda_runtime": Category.LAUNCH,
    "cuda_driver": Category.LAUNCH,
    "hip_runtime": Category.LAUNCH,
    "hip_driver": Category.LAUNCH,
    "privateuse1_runtime": Category.LAUNCH,
    "privateuse1_driver": Category.LAUNCH,
    "Runtime": Category.LAUNCH,
    "cpu_op": Category.OPERATOR,
    "Operator": Category.OPERATOR,
    "user_annotation": Category.ANNOTATION,
}

COMMUNICATION_OPERATORS = ("record_param_comms", "c10d::", "nccl:", "gloo:", "rccl:", "ucc:")
"""How the names of host events begin whose arguments say what is communicated."""


class _Arguments(msgspec.Struct, gc=False):
    """Of an event; anything may be missing or of another type."""

    correlation: Any = None
    external: Any = msgspec.field(default=None, name="External id")
    stream: Any = None
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


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = float("nan")
    dur: float = float("nan")
    pid: Any = None
    tid: Any = None
    args: _Arguments | None = None


class _ExactEvent(msgspec.Struct, gc=False):
    """The same events, with decimals. See [Note: exact times]."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Decimal = Decimal("nan")
    dur: Decimal = Decimal("nan")
    pid: Any = None
    tid: Any = None
    args: _Arguments | None = None


@dataclass(frozen=True, slots=True)
class Message:
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


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events of one category; arrays of shape (n,), in the order of the file."""

    name: Int32Array
    """Index into the trace's names."""
    thread: Int32Array
    """Of a host event its thread, of a device event its stream; numbered as they come."""
    start_ns: Int64Array
    end_ns: Int64Array
    correlation: Int64Array
    """Ties a launch to what ran on the device; -1: none."""
    external: Int64Array
    """Ties a device event to its host operator; -1: none."""

    def __len__(self) -> int:
        return len(self.name)

    def where(self, chosen: NDArray[np.generic]) -> "EventColumns":
        """The events that a mask or an index array selects."""
        return EventColumns(
            *(
                one[chosen]
                for one in (
                    self.name,
                    self.thread,
                    self.start_ns,
                    self.end_ns,
                    self.correlation,
                    self.external,
                )
            )
        )


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """One trace in columns."""

    name: str
    """The file's name."""
    events: dict[Category, EventColumns]
    messages: dict[Category, dict[int, Message]]
    """What the arguments say about communication, by position in the category's events."""
    names: tuple[str, ...]
    beside: dict[str, Any]
    """What stands beside the events: `distributedInfo`, `baseTimeNanoseconds`, ..."""
    num_events: int
    """Of all kinds, those that are left out included."""
    num_odd: int
    """Events that were left out since their times are missing, negative or absurd."""


def read_trace(
    path: Path, limits: ImportLimits, on_progress: OnProgress | None = None
) -> KinetoTrace:
    """Read a trace, plain or gzipped, in memory that does not hold the file.

    Args:
        path: The file.
        limits: What may be read.
        on_progress: Called with the part of the file that is read, 0 to 1.

    Raises:
        ImportingError: It cannot be read, is no trace, or is beyond the limits.
    """
    reader = EventReader(read_blocks(path, limits, on_progress), path.name, limits)
    columns = _Columns()
    decoder = msgspec.json.Decoder(list[_Event])
    exact = msgspec.json.Decoder(list[_ExactEvent])

    def decode(raw: bytes) -> Sequence[_Event | _ExactEvent]:
        events = decoder.decode(raw)
        return exact.decode(raw) if _needs_decimals(events) else events

    for stretch in reader.stretches(decode, columns.decode_odd):  # type: ignore[arg-type]
        columns.add(stretch)
    return KinetoTrace(
        name=path.name,
        events={category: columns.of(category) for category in Category},
        messages=columns.messages,
        names=tuple(columns.names),
        beside=reader.beside,
        num_events=columns.num_events + columns.num_unreadable,
        num_odd=columns.num_odd + columns.num_unreadable,
    )


def _needs_decimals(events: Sequence[_Event]) -> bool:
    """Whether the times are too large for floats; all of a trace have the same zero."""
    return bool(events) and any(event.ts >= _EXACT_US for event in (events[0], events[-1]))


@dataclass
class _Columns:
    """Grows stretch by stretch."""

    names: dict[str, int] = field(default_factory=dict)
    messages: dict[Category, dict[int, Message]] = field(
        default_factory=lambda: {category: {} for category in Category}
    )
    num_events: int = 0
    num_odd: int = 0
    num_unreadable: int = 0
    _communicates: list[bool] = field(default_factory=list)
    """By name, as far as it was asked for."""
    _threads: dict[tuple[Any, Any], int] = field(default_factory=dict)
    _parts: dict[Category, list[EventColumns]] = field(
        default_factory=lambda: {category: [] for category in Category}
    )
    _counts: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))

    def decode_odd(self, raw: bytes) -> _Event | None:
        """One event that does not fit the types: what it has that does; None if that is nothing.

        Raises:
            ValueError: It is no JSON, even as Python reads it (NaN, control characters).
            RecursionError: It is nested too deeply.
        """
        value = json.loads(raw.decode("utf-8", "replace"), strict=False)
        try:
            return msgspec.convert(value, _Event, strict=False)
        except (msgspec.ValidationError, OverflowError, ValueError):
            self.num_unreadable += 1
            return None

    def add(self, events: Sequence[_Event | _ExactEvent]) -> None:
        """Keep what is needed of these events."""
        self.num_events += len(events)
        sorted_out: dict[Category, list[Any]] = {category: [] for category in Category}
        for event in events:
            category = _CATEGORIES.get(event.cat)
            if category is not None and event.ph == "X":
                sorted_out[category].append(event)
        for category, members in sorted_out.items():
            if members:
                self._add(category, members)

    def of(self, category: Category) -> EventColumns:
        """All events of a category."""
        parts = self._parts.pop(category) or [_NO_EVENTS]
        return EventColumns(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in EventColumns.__dataclass_fields__
            )
        )

    def _add(self, category: Category, events: list[Any]) -> None:
        start_ns, end_ns, is_sound = _times_ns(events)
        if not is_sound.all():
            self.num_odd += int(np.count_nonzero(~is_sound))
            events = [events[position] for position in np.flatnonzero(is_sound).tolist()]
            start_ns, end_ns = start_ns[is_sound], end_ns[is_sound]
        names, threads = self.names, self._threads
        arguments = [event.args for event in events]
        name = np.array([names.setdefault(e.name, len(names)) for e in events], np.int32)
        self._parts[category].append(
            EventColumns(
                name=name,
                thread=np.array(
                    [threads.setdefault(_thread_key(e), len(threads)) for e in events], np.int32
                ),
                start_ns=start_ns,
                end_ns=end_ns,
                correlation=_ids([one.correlation if one else None for one in arguments]),
                external=_ids([one.external if one else None for one in arguments]),
            )
        )
        self._keep_messages(category, name, arguments)
        self._counts[category] += len(events)

    def _keep_messages(
        self, category: Category, names: Int32Array, arguments: list[_Arguments | None]
    ) -> None:
        """What communications say: device events that carry it, host events by their name."""
        if category is Category.KERNEL:
            chosen = [i for i, one in enumerate(arguments) if one and one.collective is not None]
        elif category in (Category.OPERATOR, Category.ANNOTATION):
            chosen = np.flatnonzero(self._is_communication(names)).tolist()
        else:
            return
        first, messages = self._counts[category], self.messages[category]
        for position in chosen:
            one = arguments[position]
            messages[first + position] = _message(one) if one else Message()

    def _is_communication(self, names: Int32Array) -> NDArray[np.bool_]:
        known = self._communicates
        for name in list(self.names)[len(known) :]:
            known.append(name.startswith(COMMUNICATION_OPERATORS))
        return np.array(known, dtype=bool)[names]


_NO_NUMBERS = np.empty(0, dtype=np.int64)
_NO_EVENTS = EventColumns(
    np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), *(4 * [_NO_NUMBERS])
)


def _thread_key(event: Any) -> tuple[Any, Any]:
    key = (event.pid, event.tid)
    try:
        hash(key)
    except TypeError:
        return (repr(event.pid), repr(event.tid))
    return key


def _times_ns(events: list[Any]) -> tuple[Int64Array, Int64Array, NDArray[np.bool_]]:
    """Starts, ends, and which of them can be believed."""
    if isinstance(events[0], _ExactEvent):
        start, duration = ([_decimal_ns(v) for v in times] for times in _both(events))
        starts, durations = np.array(start, np.int64), np.array(duration, np.int64)
    else:
        starts, durations = (_float_ns(np.array(times)) for times in _both(events))
    is_sound = (starts >= 0) & (durations >= 0) & (starts < _MAX_NS) & (durations < _MAX_NS)
    return starts, np.where(is_sound, starts + durations, starts), is_sound


def _both(events: list[Any]) -> tuple[list[Any], list[Any]]:
    return [event.ts for event in events], [event.dur for event in events]


def _float_ns(times_us: NDArray[np.float64]) -> Int64Array:
    """Integer ns of µs; -1 for what is not finite or absurd. See [Note: exact times]."""
    is_sane = np.abs(times_us) < _MAX_NS / 1000
    whole = np.floor(np.where(is_sane, times_us, -1.0))
    fraction = np.where(is_sane, times_us, -1.0) - whole
    thousandths = np.rint(fraction * 1000).astype(np.int64)
    return np.asarray(whole.astype(np.int64) * 1000 + thousandths, dtype=np.int64)


def _decimal_ns(time_us: Decimal) -> int:
    if not time_us.is_finite() or abs(time_us) >= _MAX_NS // 1000:
        return NOTHING
    return int((time_us * 1000).to_integral_value())


def _ids(values: list[Any]) -> Int64Array:
    """Ids as they come: numbers, or numbers as text; -1 for what is neither."""
    try:
        return np.array([NOTHING if value is None else value for value in values], np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_id(value) for value in values], np.int64)


def _id(value: Any) -> int:
    number = _whole(value)
    return NOTHING if number is None or number >= _MAX_NS else number


def _message(arguments: _Arguments) -> Message:
    sizes = [_whole(one) for one in (arguments.in_elements, arguments.out_elements)]
    known = [size for size in sizes if size is not None]
    dims, types = _decode_raw(arguments.dims), _decode_raw(arguments.types)
    return Message(
        collective=_text(arguments.collective),
        elements=max(known) if known else None,
        dtype=_text(arguments.dtype) or _first_dtype(types),
        group_size=_whole(arguments.group_size),
        group_name=_text(arguments.group_name),
        group_description=_text(arguments.group_description),
        group_ranks=_ranks(arguments.group_ranks),
        input_elements=_element_counts(dims),
    )


def _whole(value: Any) -> int | None:
    """A whole number that is not negative, also as text; None for everything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return value if isinstance(value, int) and 0 <= value < _MAX_NS else None


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int)) and str(value) else None


def _ranks(value: Any) -> tuple[int, ...] | None:
    """`[0, 1]`, as a list or as its text; None for `[0, 1, ..., 63]`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list):
        return None
    ranks = [_whole(one) for one in value]
    return tuple(one for one in ranks if one is not None) if None not in ranks else None


def _decode_raw(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if bytes(raw) else None
    except (msgspec.DecodeError, RecursionError):
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
    sizes = [_whole(one) for one in shape]
    if not sizes or None in sizes:
        return 0
    count = 1
    for size in sizes:
        count *= size or 0
    return min(count, _MAX_NS)
