"""Read a torch.profiler trace to columns: kernels, launches, host events, names.

Only the necessary fields are decoded, and only columns are kept: about 40 bytes for an event that
takes 300 bytes in the file. Times are integer ns from the trace's own zero.

[Note: exact times] A trace has times in µs with three decimals. As a float, such a number has an
error below half a nanosecond up to 2^43 µs. Converting the integer part and the fraction separately
gives the exact nanosecond. Newer traces have times from a base time and stay below this limit.
Older traces have µs since 1970, for which floats are too coarse: these are decoded as decimals.
"""

import contextlib
import gc
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import IntEnum
from functools import lru_cache
from itertools import compress, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.json_events import EventReader
from fsdp_inspect.importing.kernel_names import user_line
from fsdp_inspect.importing.messages import (
    NOTHING,
    CollectiveMessage,
    EventArguments,
    MessageReader,
    dtype_code_of_name,
    read_whole,
)
from fsdp_inspect.importing.trace_file import ImportLimits, OnProgress, return_freed_memory
from fsdp_inspect.importing.trace_sources import read_trace_blocks
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE
from fsdp_inspect.trace.tables import Rows

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

_EXACT_US = 2.0**43
LATEST_NS = 1 << 61
"""The latest end of an event, and of a wall time: the sum of two is a `Moment`."""


class Category(IntEnum):
    """The category of a complete event; events of other categories are left out."""

    KERNEL = 0
    MEMORY_COPY = 1
    LAUNCH = 2
    OPERATOR = 3
    ANNOTATION = 4
    PYTHON = 5
    """Functions of the user's code, in traces with stacks; those of libraries are left out."""
    OVERHEAD = 6
    """Work of the driver or of the profiler itself, such as the loading of a kernel."""


_COMPLETE = "X"
"""The phase of an event that has a start and a duration."""
_LEAST_DOUBLED = 10
"""Fewer equal events without ids may be equal by chance."""
_BEGIN = "B"
_PAIRED = frozenset({_BEGIN, "E"})
"""The phases of events that state the begin or the end alone."""
_DEVICES = (
    *("gpu", "cuda", "hip", "xpu", "mtia", "glow", "hpu", "privateuse1"),
    *("mlu", "gcu", "musa", "npu"),
)
"""Prefixes of categories: NVIDIA, AMD, Intel, Meta, Habana, and devices outside of torch."""
_ENDINGS = {
    "memcpy": Category.MEMORY_COPY,
    "memset": Category.MEMORY_COPY,
    "runtime": Category.LAUNCH,
    "driver": Category.LAUNCH,
}
_CATEGORIES = {
    "kernel": Category.KERNEL,
    "Kernel": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "collective_comm": Category.KERNEL,
    "Memcpy": Category.MEMORY_COPY,
    "Memset": Category.MEMORY_COPY,
    "Runtime": Category.LAUNCH,
    "runtime": Category.LAUNCH,
    "driver": Category.LAUNCH,
    "cpu_op": Category.OPERATOR,
    "Operator": Category.OPERATOR,
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.PYTHON,
    "overhead": Category.OVERHEAD,
    **{
        f"{device}_{ending}": category
        for device in _DEVICES
        for ending, category in _ENDINGS.items()
    },
}
"""Names of libkineto, of its versions for other devices, and of old versions (`Kernel`)."""
_NOT_WORK = frozenset(
    {
        *("ac2g", "fwdbwd", "Trace", "cpu_instant_event"),
        *("cuda_event", "itt_annotation", "", "async_gpu", "user_annotation_async"),
        *("external_correlation", "gpu_pm_counter", "mtia_counters", "xpu_scope_profiler"),
        *(f"{device}_user_annotation" for device in _DEVICES),
        *(f"{device}_sync" for device in _DEVICES),
        *(f"{device}_profiler_range" for device in _DEVICES),
    }
)
"""Categories of complete events that do not describe work of a device."""
_CODES = {name: int(category) for name, category in _CATEGORIES.items()}
"""Plain numbers: an array of enum members takes three times as long to make."""

COMMUNICATION_OPERATORS = ("record_param_comms", "c10d::", "nccl:", "gloo:", "rccl:", "ucc:")
"""Name prefixes of host events whose arguments describe a communication."""

_TELLING_OPERATORS = (
    *(*COMMUNICATION_OPERATORS, "fsdp::", "autograd::engine"),
    *("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"),
)
"""Name prefixes of operators that identify the owner of the kernels that they launch, or that read
a value."""


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = float("nan")
    dur: float = float("nan")
    pid: Any = None
    tid: Any = None
    args: EventArguments | None = None


class _ExactEvent(msgspec.Struct, gc=False):
    """The same event with decimal times. See [Note: exact times]."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Decimal = Decimal("nan")
    dur: Decimal = Decimal("nan")
    pid: Any = None
    tid: Any = None
    args: EventArguments | None = None


@dataclass(frozen=True, slots=True)
class EventColumns(Rows):
    """Events of one category; arrays of shape (n,), in the order of the file."""

    name: Int32Array
    """Index into the trace's names."""
    thread: Int32Array
    """The thread of a host event or the stream of a device event, numbered by first occurrence."""
    start_ns: Int64Array
    end_ns: Int64Array
    correlation: Int64Array
    """Shared id of a launch and its device event; -1: none."""
    external: Int64Array
    """Shared id of a device event and its host operator; -1: none."""
    flops: Int64Array
    """Floating-point operations of a host operator with shapes; 0: unknown, or none."""
    moved_bytes: Int64Array
    """Bytes that a host operator with shapes reads and writes; 0: unknown, or none."""

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """One trace in columns."""

    name: str
    """The file's name."""
    events: dict[Category, EventColumns]
    messages: dict[Category, dict[int, CollectiveMessage]]
    """Messages in the arguments of events, by index in the category's events."""
    names: tuple[str, ...]
    processes: tuple[int, ...]
    """The process of each thread or stream, numbered by first occurrence. The process of a stream
    is its device."""
    other_values: dict[str, Any]
    """The other values of the file: `distributedInfo`, `baseTimeNanoseconds`, ..."""
    num_events: int
    """Events of all categories, including those left out."""
    num_odd: int
    """Events left out because their times are missing, negative or out of range."""
    unread: Mapping[str, int]
    """The number of complete events by unknown category: work that may be missing."""
    num_doubled: int = 0
    """Events left out because the file has the same event before."""
    num_unpaired: int = 0
    """Begin and end events left out because the other one of the pair is missing."""

    def with_kernels(self, copies: NDArray[np.bool_]) -> "KinetoTrace":
        """The same trace with some copies as the last kernels.

        Args:
            copies: Mask of the copies; shape (number of copies,).
        """
        moved = self.events[Category.MEMORY_COPY]
        events = {
            **self.events,
            Category.KERNEL: join_columns([self.events[Category.KERNEL], moved.where(copies)]),
            Category.MEMORY_COPY: moved.where(~copies),
        }
        return replace(self, events=events)

    def without(self, *categories: Category) -> "KinetoTrace":
        """The same trace without the events of some categories."""
        events = {
            category: _NO_EVENTS if category in categories else columns
            for category, columns in self.events.items()
        }
        return replace(self, events=events)


def read_trace(
    path: Path,
    limits: ImportLimits,
    on_progress: OnProgress | None = None,
    process: int | None = None,
) -> KinetoTrace:
    """Read a trace without holding the whole file in memory.

    Args:
        path: The file: JSON, plain or gzipped, or a file of a `trace_sources.TraceSource`.
        limits: Limits of the sizes to read.
        on_progress: Called with the fraction of the file that is read, 0 to 1.
        process: The process, if the file has several.

    Raises:
        ImportingError: The file cannot be read, is not a trace, or exceeds the limits.
    """
    blocks = read_trace_blocks(path, process, limits, on_progress)
    reader = EventReader(blocks, path.name, limits)
    columns = _Columns()
    decoder = msgspec.json.Decoder(list[_Event])
    exact = msgspec.json.Decoder(list[_ExactEvent])

    def decode(raw: bytes) -> Sequence[_Event | _ExactEvent]:
        events = decoder.decode(raw)
        return exact.decode(raw) if _needs_decimals(events) else events

    with _without_cycle_collection():
        for batch in reader.batches(decode, columns.decode_odd):  # type: ignore[arg-type]
            if not columns.num_events and batch and not any(event.ph for event in batch):
                raise ImportingError(
                    f"{path.name} is not a trace: none of its first {len(batch):,} objects has a "
                    "phase ('ph'). Expected events as torch.profiler writes them. Export a trace "
                    "with prof.export_chrome_trace(path)."
                )
            columns.add(batch)
            del batch
    columns.forget_unneeded()
    num_doubled = columns.forget_doubled()
    events = {category: columns.of(category) for category in Category}
    return_freed_memory()
    return KinetoTrace(
        name=path.name,
        events=events,
        messages=columns.messages,
        names=tuple(columns.names),
        processes=columns.processes(),
        other_values=reader.other_values,
        num_events=columns.num_events + columns.num_unreadable,
        num_odd=columns.num_odd + columns.num_unreadable,
        unread=dict(columns.unread.most_common()),
        num_doubled=num_doubled,
        num_unpaired=columns.num_unpaired,
    )


@contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Disable garbage collection of cycles: events have no cycles, and the search is slow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _needs_decimals(events: Sequence[_Event]) -> bool:
    """Whether the times are too large for floats; all times of a trace have the same zero."""
    return bool(events) and any(event.ts >= _EXACT_US for event in (events[0], events[-1]))


KeyT = TypeVar("KeyT")


class _Numbers(dict[KeyT, int]):
    """Numbers for keys, in the order of their first occurrence."""

    def __missing__(self, key: KeyT) -> int:
        number = self[key] = len(self)
        return number

    def of(self, keys: Sequence[KeyT]) -> Int32Array:
        """The number of each key. Shape (n,)."""
        return np.fromiter(map(self.__getitem__, keys), np.int32, len(keys))


@dataclass
class _Columns:
    """Columns that grow with each batch of events."""

    names: _Numbers[str] = field(default_factory=_Numbers)
    messages: dict[Category, dict[int, CollectiveMessage]] = field(
        default_factory=lambda: {category: {} for category in Category}
    )
    num_events: int = 0
    num_odd: int = 0
    num_unreadable: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    num_unmatched_ends: int = 0
    _begun: dict[Any, list[Any]] = field(default_factory=dict)
    """Begin events whose end is still missing, by thread; the innermost one comes last."""
    _reader: MessageReader = field(default_factory=MessageReader)
    _communicates: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=bool))
    """For each name, whether it is a communication; computed on demand."""
    _threads: _Numbers[Any] = field(default_factory=_Numbers)
    _parts: dict[Category, list[EventColumns]] = field(
        default_factory=lambda: {category: [] for category in Category}
    )
    _counts: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))

    def decode_odd(self, raw: bytes) -> _Event | None:
        """Decode the valid fields of an event with invalid types; None without valid fields.

        Raises:
            ValueError: The bytes are not JSON, even with Python's extensions (NaN, control
                characters).
            RecursionError: The event is nested too deeply.
        """
        value = json.loads(raw.decode("utf-8", "replace"), strict=False)
        with contextlib.suppress(msgspec.ValidationError, OverflowError, ValueError):
            return msgspec.convert(value, _Event, strict=False)
        try:  # `convert` makes no `Raw` of a list, such as the shapes of an operator
            return msgspec.json.decode(msgspec.json.encode(value), type=_Event, strict=False)
        except (msgspec.ValidationError, OverflowError, ValueError):
            self.num_unreadable += 1
            return None

    def add(self, events: Sequence[_Event | _ExactEvent]) -> None:
        """Append the necessary fields of these events."""
        self.num_events += len(events)
        complete = [one for one in events if one.ph == _COMPLETE]
        if len(complete) < len(events):
            complete += self._pair(one for one in events if one.ph in _PAIRED)
        kept = [
            one
            for one in complete
            if one.cat in _CODES and (one.cat != "python_function" or user_line(one.name))
        ]
        if len(kept) < len(complete):
            others = (one.cat for one in complete if one.cat not in _CODES)
            self.unread.update(category for category in others if category not in _NOT_WORK)
        if kept:
            self._add(kept)

    @property
    def num_unpaired(self) -> int:
        """Begin events without an end, and ends without a begin event."""
        return self.num_unmatched_ends + sum(map(len, self._begun.values()))

    def _pair(self, events: Iterable[_Event | _ExactEvent]) -> Iterator[_Event | _ExactEvent]:
        """Join begin and end events of each thread to complete events; pairs may be nested."""
        for one in events:
            begun = self._begun.setdefault(repr((one.pid, one.tid)), [])
            if one.ph == _BEGIN:
                begun.append(one)
            elif begun:
                first = begun.pop()
                first.ph, first.dur = _COMPLETE, one.ts - first.ts
                yield first
            else:
                self.num_unmatched_ends += 1

    def forget_doubled(self) -> int:
        """Drop each event that equals an earlier one in name, thread, times and ids.

        A stream runs one kernel at a time, and a thread one call of one name from one moment on.

        Returns:
            The number of dropped events of all categories.
        """
        num_dropped = 0
        for category in Category:
            columns = join_columns(self._parts.pop(category) or [_NO_EVENTS])
            kept = _first_of_equals(columns, are_labels=category is Category.ANNOTATION)
            if len(kept) < len(columns):
                num_dropped += len(columns) - len(kept)
                places = {old: new for new, old in enumerate(kept.tolist())}
                messages = self.messages[category]
                self.messages[category] = {
                    places[old]: messages[old] for old in sorted(messages) if old in places
                }
                columns = columns.where(kept)
            self._parts[category] = [columns]
        return num_dropped

    def forget_unneeded(self) -> None:
        """Drop host operators without needed information if kernels have launches."""
        if not (self._counts[Category.KERNEL] and self._counts[Category.LAUNCH]):
            return
        tells = np.array([name.startswith(_TELLING_OPERATORS) for name in self.names], dtype=bool)
        old, new = self.messages[Category.OPERATOR], dict[int, CollectiveMessage]()
        first = count = 0
        parts = self._parts[Category.OPERATOR]
        for place, part in enumerate(parts):
            kept = np.flatnonzero(tells[part.name] | (part.flops > 0) | (part.moved_bytes > 0))
            moved = enumerate((first + kept).tolist(), count)
            new.update({position: old[before] for position, before in moved if before in old})
            first, count = first + len(part), count + len(kept)
            parts[place] = part.where(kept)
        self.messages[Category.OPERATOR] = new

    def processes(self) -> tuple[int, ...]:
        """The process of each thread, numbered by first occurrence."""
        numbers = _Numbers[str]()
        return tuple(numbers.of([_process_of(key) for key in self._threads]).tolist())

    def of(self, category: Category) -> EventColumns:
        """All events of a category."""
        parts = self._parts.pop(category) or [_NO_EVENTS]
        return join_columns(parts)

    def _add(self, events: list[Any]) -> None:
        # List comprehensions over one attribute are twice as fast as attrgetter with map.
        codes = np.array([_CODES[event.cat] for event in events], dtype=np.int8)
        start_ns, end_ns, is_sound = _times_ns(events)
        if not is_sound.all():
            self.num_odd += int(np.count_nonzero(~is_sound))
            events = list(compress(events, is_sound.tolist()))
            start_ns, end_ns, codes = start_ns[is_sound], end_ns[is_sound], codes[is_sound]
        arguments = [event.args or _NO_ARGUMENTS for event in events]
        columns = EventColumns(
            name=self.names.of([event.name for event in events]),
            thread=_number_threads(events, self._threads),
            start_ns=start_ns,
            end_ns=end_ns,
            correlation=_ids([one.correlation for one in arguments]),
            external=_ids([one.external for one in arguments]),
            **_count_work(codes, events, arguments),
        )
        says = self._find_messages(codes, columns.name, arguments)
        for category in Category:
            mine = np.flatnonzero(codes == category)
            if len(mine) == 0:
                continue
            self._parts[category].append(columns.where(mine))
            first, messages = self._counts[category], self.messages[category]
            for place in np.flatnonzero(says[mine]).tolist():
                messages[first + place] = self._reader.read(arguments[mine[place]])
            self._counts[category] += len(mine)

    def _find_messages(
        self, codes: NDArray[np.int8], names: Int32Array, arguments: list[EventArguments]
    ) -> NDArray[np.bool_]:
        """Mask of events that describe a communication: kernels by fields, host events by name."""
        carries = np.array([one.collective is not None for one in arguments], dtype=bool)
        is_host = (codes == Category.OPERATOR) | (codes == Category.ANNOTATION)
        is_kernel = codes == Category.KERNEL
        says = (carries & is_kernel) | (is_host & self._is_communication(names))
        return np.asarray(says, dtype=bool)

    def _is_communication(self, names: Int32Array) -> NDArray[np.bool_]:
        known = self._communicates
        if len(known) < len(self.names):
            new = [
                name.startswith(COMMUNICATION_OPERATORS)
                for name in islice(self.names, len(known), None)
            ]
            self._communicates = known = np.append(known, new)
        return np.asarray(known[names], dtype=bool)


def _first_of_equals(columns: EventColumns, *, are_labels: bool) -> NDArray[np.int64]:
    """The positions of the events, without those that equal an earlier one; ascending.

    Events without an id count only if they are labels, or if every event is there twice: a
    converter doubled them all.
    """
    count = len(columns)
    keys = (
        *(columns.correlation, columns.external, columns.name, columns.thread),
        *(columns.end_ns, columns.start_ns),
    )
    order = np.lexsort((np.arange(count), *keys))
    is_equal = np.zeros(count, dtype=bool)
    if count:
        same = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
        same &= (columns.end_ns > columns.start_ns)[order][1:]
        has_id = ((columns.correlation >= 0) | (columns.external >= 0))[order][1:]
        are_all = are_labels or (count >= _LEAST_DOUBLED and 2 * np.count_nonzero(same) == count)
        is_equal[order[1:]] = same if are_all else same & has_id
    return np.flatnonzero(~is_equal)


def join_columns(parts: list[EventColumns]) -> EventColumns:
    """Join parts of one category; the list is emptied, so that the memory of each is freed."""
    parts = parts or [_NO_EVENTS]
    columns = {
        name: [getattr(part, name) for part in parts] for name in EventColumns.__dataclass_fields__
    }
    parts.clear()
    return EventColumns(*(np.concatenate(columns.pop(name)) for name in list(columns)))


_NO_NUMBERS = np.empty(0, dtype=np.int64)
_NO_EVENTS = EventColumns(
    np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), *(6 * [_NO_NUMBERS])
)


_NO_ARGUMENTS = EventArguments()


def _number_threads(events: list[Any], known: _Numbers[Any]) -> Int32Array:
    keys: list[Any] = [(event.pid, event.tid) for event in events]
    try:
        return known.of(keys)
    except TypeError:  # lists and objects are not valid threads
        return known.of(list(map(repr, keys)))


def _process_of(thread: Any) -> str:
    """The process of a key of `_number_threads`."""
    return repr(thread[0]) if isinstance(thread, tuple) else ""


def _times_ns(events: list[Any]) -> tuple[Int64Array, Int64Array, NDArray[np.bool_]]:
    """Starts, ends, and a mask of the valid ones."""
    times_us = [event.ts for event in events] + [event.dur for event in events]
    if isinstance(events[0], _ExactEvent):
        both = np.array([_decimal_ns(time_us) for time_us in times_us], np.int64)
    else:
        both = _float_ns(np.fromiter(times_us, np.float64, len(times_us)))
    starts, durations = both[: len(events)], both[len(events) :]
    is_sound = (starts >= 0) & (durations >= 0) & (durations < LATEST_NS)
    is_sound &= starts + durations < LATEST_NS
    return starts, np.where(is_sound, starts + durations, starts), is_sound


def _float_ns(times_us: NDArray[np.float64]) -> Int64Array:
    """Convert µs to integer ns; -1 for infinite or out-of-range times. See [Note: exact times]."""
    is_sane = np.abs(times_us) < LATEST_NS / 1000
    sane_us = times_us if is_sane.all() else np.where(is_sane, times_us, -1.0)
    whole = np.floor(sane_us)
    thousandths = np.rint((sane_us - whole) * 1000).astype(np.int64)
    return np.asarray(whole.astype(np.int64) * 1000 + thousandths, dtype=np.int64)


def _decimal_ns(time_us: Decimal) -> int:
    if not time_us.is_finite() or abs(time_us) >= LATEST_NS // 1000:
        return NOTHING
    return int((time_us * 1000).to_integral_value())


def _ids(values: list[Any]) -> Int64Array:
    """Convert ids, which are numbers or numbers as text; -1 for all other values."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([_id(value) for value in values], np.int64)


def _id(value: Any) -> int:
    number = read_whole(value)
    return NOTHING if number is None else number


# --- Count the operations of matrix products and attention, and the bytes of operators that are as
# fast as the memory, from their shapes.


def _count_work(
    codes: NDArray[np.int8], events: list[Any], arguments: list[EventArguments]
) -> dict[str, Int64Array]:
    """The columns `flops` and `moved_bytes` of events. Shape (n,)."""
    flops, moved = (np.zeros(len(events), dtype=np.int64) for _ in range(2))
    names = {event.name for event in events}
    products = {name for name in names if name.startswith(PRODUCT_OPERATORS)}
    movers = {name for name in names if name.removesuffix("_") in _MOVERS}
    if products or movers:
        for place in np.flatnonzero(codes == Category.OPERATOR).tolist():
            name, given = events[place].name, arguments[place]
            if name in products:
                flops[place] = count_operations(name, bytes(given.dims))
            elif name in movers:
                moved[place] = count_moved_bytes(name, bytes(given.dims), bytes(given.types))
    return {"flops": flops, "moved_bytes": moved}


PRODUCT_OPERATORS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation"),
    *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_dot_product_"),
)
"""Prefixes of the operators that run a kernel of a matrix product or of attention."""
_ADDED_FIRST = ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")
"""Operators whose first input is added to the product of the second and the third."""
_ATTENTION = "aten::_scaled_dot_product_"
_MOST = 1 << 62


@lru_cache(maxsize=4096)
def count_operations(name: str, dims: bytes) -> int:
    """The operations of an operator; 0 if its shapes are missing or of another form.

    A multiplication and an addition count as two. Causal attention is counted whole, as in MFU.

    Args:
        name: The operator.
        dims: Its `Input Dims`, as JSON.
    """
    try:
        shapes = msgspec.json.decode(dims) if dims else []
        flops = _attention(name, shapes) if name.startswith(_ATTENTION) else _product(name, shapes)
    except (msgspec.DecodeError, TypeError, ValueError, IndexError):
        return 0
    return flops if 0 <= flops < _MOST else 0


def _product(name: str, shapes: list[list[int]]) -> int:
    first = 1 if name in _ADDED_FIRST else 0
    left, right = shapes[first], shapes[first + 1]
    if left[-1] != right[-2]:
        return 0
    return 2 * math.prod(left) * right[-1]


def _attention(name: str, shapes: list[list[int]]) -> int:
    """Two products in forward, five in backward, which recomputes the scores."""
    is_backward = name.endswith("_backward")
    query, key = shapes[1:3] if is_backward else shapes[:2]
    return (10 if is_backward else 4) * math.prod(query) * key[-2]


_MOVERS = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "sin"),
        *("cos", "sigmoid", "tanh", "relu", "gelu", "silu", "where", "masked_fill", "clone"),
        *("sigmoid_backward", "tanh_backward", "threshold_backward", "gelu_backward"),
        *("silu_backward", "addcmul", "addcdiv", "lerp", "copy", "fill", "zero"),
        *("native_layer_norm", "_fused_rms_norm", "_softmax", "_log_softmax"),
        *("_softmax_backward_data", "_log_softmax_backward_data"),
    )
)
"""Operators that read each input once and write one result of the broadcast shape; with a `_` at
the end, they write the first input. Of norms, the bytes of statistics are left out."""
_ONLY_WRITES = ("aten::copy_", "aten::fill_", "aten::zero_")
"""They do not read the tensor that they write."""


@lru_cache(maxsize=4096)
def count_moved_bytes(name: str, dims: bytes, types: bytes) -> int:
    """The bytes that an operator reads and writes at least; 0: its shapes or dtypes are unknown.

    Args:
        name: The operator, one of `_MOVERS`.
        dims: Its `Input Dims`, as JSON.
        types: Its `Input type`, as JSON.
    """
    try:
        shapes, named = msgspec.json.decode(dims), msgspec.json.decode(types)
        given = [
            (shape, ITEMSIZE[DTYPES[dtype_code_of_name(dtype)]])
            for shape, dtype in zip(shapes, named, strict=True)
            if shape
        ]
        sizes = [math.prod(shape) * itemsize for shape, itemsize in given]
        if name.endswith("_"):
            moved = sum(sizes) + (0 if name in _ONLY_WRITES else sizes[0])
        else:
            written = np.broadcast_shapes(*(tuple(shape) for shape, _ in given))
            moved = sum(sizes) + math.prod(written) * given[0][1]
    except (msgspec.DecodeError, TypeError, ValueError, IndexError, KeyError):
        return 0
    return moved if 0 <= moved < _MOST else 0
