"""Convert an unpickled memory snapshot to columns and check it: segments, blocks, trace, ranges.

The input is the dictionaries of `torch.cuda.memory._snapshot()`. All versions since torch 2.0 are
supported: keys that an older version did not write are optional. Names of actions and states are
torch's (`torch.cuda.memory._snapshot`, torch 2.13; the code writes `active_pending_free`, its
documentation has `active_awaiting_free`).

Conventions: addresses and sizes are int64; times are microseconds of wall time, -1 if unknown.
"""

import reprlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.importing.snapshot_labels import NO_PLACE, UNLABELLED, Labels, Places

Int64Array = NDArray[np.int64]

MAX_ROWS = 8_000_000
"""Limit of the blocks, trace entries and annotations of one snapshot. A pickle can list one shared
object many times, so the file's size does not limit their number."""

_REMEDY = "Dump it again with torch.cuda.memory._dump_snapshot."
_MAX_BYTES = 1 << 50
"""Limit of the memory of one device or one request: a pebibyte."""
_MAX_TIME_US = 1 << 52
_MAX_DEVICE = 1023


class Action(IntEnum):
    """An action of the allocator; names as in torch's trace entries."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_MAP = 4
    SEGMENT_FREE = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    OTHER = 8
    """`snapshot`, and actions of later versions: they change no amount of memory."""


class BlockState(IntEnum):
    """The state of a block."""

    INACTIVE = 0
    ACTIVE = 1
    PENDING_FREE = 2
    """The block is freed, but another stream may still use it."""


_ACTIONS = {action.name.lower(): action for action in Action if action is not Action.OTHER}
_STATES = {
    "inactive": BlockState.INACTIVE,
    "active_allocated": BlockState.ACTIVE,
    "active_pending_free": BlockState.PENDING_FREE,
    "active_awaiting_free": BlockState.PENDING_FREE,
}
_ANNOTATION = "user_defined"
"""The action of annotations, which torch 2.4 and 2.5 store inside the trace."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one device when the snapshot was taken; arrays of shape (blocks,)."""

    address: Int64Array
    size: Int64Array
    """Size in the segment, rounded up."""
    requested: Int64Array
    state: NDArray[np.int8]
    """A `BlockState`."""
    segment: Int64Array
    """Index of the segment that contains the block."""
    label: NDArray[np.int8]
    """The code of `Labels` for the block's metadata and stack."""
    place: NDArray[np.int32]
    """The number of the line that allocated it, see `Places`."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The actions of the allocator of one device, in order; arrays of shape (entries,)."""

    action: NDArray[np.int8]
    """An `Action`."""
    address: Int64Array
    """The address; for OOM entries, the free bytes of the device."""
    size: Int64Array
    """Requested size before rounding; for segments, the size taken from the device."""
    time_us: Int64Array
    label: NDArray[np.int8]
    place: NDArray[np.int32]
    """The line of an allocation or a failed request; 0 for other actions."""
    stream: Int64Array
    """The stream of the block or segment, an address."""
    pool: NDArray[np.int32]
    """The number of the memory pool; 0: the default pool."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one device when the snapshot was taken; arrays of shape (segments,)."""

    address: Int64Array
    size: Int64Array
    stream: Int64Array
    pool: Int64Array
    """The number of the memory pool; 0: the default pool."""
    is_small: NDArray[np.bool_]
    is_expandable: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.size)


@dataclass(frozen=True, slots=True)
class Annotation:
    """The start or the end of a named range of the program."""

    time_us: int
    name: str
    is_start: bool


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device of a snapshot."""

    device: int
    segments: Segments
    blocks: Blocks
    trace: Trace
    is_profile: bool
    """Whether torch made it from a profile (`_memory_viz.profile_plot`). It then has tensors with
    categories, and one segment that is only the range of their addresses."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return int(self.segments.size.sum())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of blocks that tensors use, rounded up like torch's `allocated_bytes`."""
        return int(self.blocks.size[self.blocks.state == BlockState.ACTIVE].sum())

    @property
    def active_bytes(self) -> int:
        """Allocated bytes plus blocks that wait for another stream."""
        return int(self.blocks.size[self.blocks.state != BlockState.INACTIVE].sum())

    @property
    def inactive_split_bytes(self) -> int:
        """Bytes of free blocks in partly used segments, which `empty_cache()` cannot return."""
        idle = self.blocks.state == BlockState.INACTIVE
        in_use = np.isin(self.blocks.segment, self.blocks.segment[~idle])
        return int(self.blocks.size[idle & in_use].sum())


@dataclass(frozen=True, slots=True)
class SnapshotContents:
    """A whole snapshot: one process, usually one device."""

    devices: tuple[DeviceMemory, ...]
    """Devices with a segment or a trace, by number."""
    annotations: tuple[Annotation, ...]
    """The annotations, by time."""
    settings: Mapping[str, str]
    """The allocator's settings, as text."""
    places: tuple[str, ...] = ("",)
    """Lines of the user's code by number, `file:line`; number 0 is none."""


def parse_snapshot(value: Any, name: str) -> SnapshotContents:
    """Convert an unpickled snapshot to columns.

    Args:
        value: The unpickled value: the dictionary of `_snapshot()`, or only its list of segments.
        name: The file's name, for messages.

    Raises:
        CorruptFileError: The value is not a snapshot, or a part of it is invalid.
    """
    try:
        return _parse(_as_snapshot(value))
    except _Complaint as complaint:
        raise CorruptFileError(f"{name} is not a memory snapshot: {complaint} {_REMEDY}") from None


class _Complaint(Exception):
    """Two sentences: the invalid value and the expected value."""


def _as_snapshot(value: Any) -> Mapping[str, Any]:
    if isinstance(value, list):
        value = {"segments": value}
    if not isinstance(value, dict) or not ("segments" in value or "device_traces" in value):
        held = sorted(value)[:5] if isinstance(value, dict) else type(value).__name__
        raise _Complaint(
            f"it contains {reprlib.repr(held)}. Expected a dictionary with 'segments' and "
            "'device_traces'."
        )
    return value


def _parse(snapshot: Mapping[str, Any]) -> SnapshotContents:
    labels, places = Labels(), Places()
    pools: dict[object, int] = {}
    builders: defaultdict[int, _DeviceBuilder] = defaultdict(
        lambda: _DeviceBuilder(labels, places, pools)
    )
    budget = _RowBudget()
    budget.spend(len(_list(snapshot, "external_annotations")))
    annotations = [
        annotation
        for entry in _list(snapshot, "external_annotations")
        for annotation in _annotation(entry)
    ]
    for segment in _list(snapshot, "segments"):
        budget.spend(1 + len(_list(segment, "blocks")))
        builders[_device(segment)].add_segment(segment)
    for device, entries in enumerate(_list(snapshot, "device_traces")[: _MAX_DEVICE + 1]):
        if not isinstance(entries, list):
            raise _Complaint(
                f"device_traces[{device}] is {reprlib.repr(entries)}. Expected a list."
            )
        budget.spend(len(entries))
        for entry in entries:
            if _text(entry, "action") == _ANNOTATION:
                annotations.extend(_old_annotation(entry))
            else:
                builders[device].add_entry(entry)
    return SnapshotContents(
        devices=tuple(builder.build(device) for device, builder in sorted(builders.items())),
        annotations=tuple(sorted(annotations, key=lambda annotation: annotation.time_us)),
        settings=_settings(snapshot.get("allocator_settings")),
        places=tuple(places.names),
    )


@dataclass(slots=True)
class _RowBudget:
    rows: int = 0

    def spend(self, rows: int) -> None:
        self.rows += rows
        if self.rows > MAX_ROWS:
            raise _Complaint(
                f"it lists over {MAX_ROWS:,} blocks and trace entries. Expected fewer: record with "
                "_record_memory_history(max_entries=100_000)."
            )


@dataclass(slots=True)
class _DeviceBuilder:
    """Gathers the rows of one device."""

    labels: Labels
    places: Places
    pools: dict[object, int]
    segments: list[tuple[int, int, int, int, bool, bool]] = field(default_factory=list)
    blocks: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)
    entries: list[tuple[int, int, int, int, int, int, int, int]] = field(default_factory=list)
    is_profile: bool = False

    def add_segment(self, segment: Mapping[str, Any]) -> None:
        number = len(self.segments)
        total = _integer(segment, "total_size")
        address = _integer(segment, "address", 0, is_address=True)
        self.segments.append(
            (
                address,
                total,
                _integer(segment, "stream", 0, is_address=True),
                self._pool(segment, "segment_pool_id"),
                segment.get("segment_type") == "small",
                segment.get("is_expandable") is True,
            )
        )
        for block in _list(segment, "blocks"):
            size = _integer(block, "size")
            state = _text(block, "state")
            if state not in _STATES:
                raise _Complaint(f"a block has the state {state!r}. Expected {', '.join(_STATES)}.")
            requested = _integer(block, "requested_size", _old_requested(block, size))
            frames = _frames(block)
            label, place = self.labels.of(block, frames), self.places.of(frames)
            here = _integer(block, "address", address, is_address=True)
            self.blocks.append((here, size, requested, _STATES[state], number, label, place))
            address = here + size
            total -= size
        if total < 0:
            raise _Complaint(
                f"the blocks of segment {number} exceed its size by {-total} bytes. Expected "
                "blocks that fit into the segment."
            )

    def add_entry(self, entry: Mapping[str, Any]) -> None:
        action = _ACTIONS.get(_text(entry, "action"), Action.OTHER)
        where = "device_free" if action is Action.OOM else "addr"
        self.is_profile |= "category" in entry
        has_place = action in (Action.ALLOC, Action.OOM)
        self.entries.append(
            (
                action,
                _integer(entry, where, 0, is_address=True),
                _integer(entry, "size", 0),
                _time(entry),
                self.labels.of(entry, _frames(entry)) if action is Action.ALLOC else UNLABELLED,
                self.places.of(_frames(entry)) if has_place else NO_PLACE,
                _integer(entry, "stream", 0, is_address=True),
                self._pool(entry, "pool_id"),
            )
        )

    def _pool(self, holder: Mapping[str, Any], key: str) -> int:
        """The number of a memory pool; older versions do not write one."""
        value = holder.get(key, (0, 0))
        ids = tuple(value) if isinstance(value, list | tuple) else ()
        if not all(type(one) is int for one in ids) or not any(ids):
            return 0
        return self.pools.setdefault(ids, len(self.pools) + 1)

    def build(self, device: int) -> DeviceMemory:
        """The columns of one device."""
        segments = np.array(self.segments, dtype=np.int64).reshape(-1, 6)
        total = sum(size for _, size, *_ in self.segments)
        if total > _MAX_BYTES:
            raise _Complaint(
                f"device {device} has segments of {total} bytes. Expected the memory of one device."
            )
        blocks = np.array(self.blocks, dtype=np.int64).reshape(-1, 7)
        address, size, requested, state, segment, label, place = blocks.T.copy()
        entries = np.array(self.entries, dtype=np.int64).reshape(-1, 8)
        action, where, amount, time_us, entry_label, entry_place, entry_stream, pool = (
            entries.T.copy()
        )
        start, held, on_stream, in_pool, is_small, is_expandable = segments.T.copy()
        return DeviceMemory(
            device=device,
            segments=Segments(start, held, on_stream, in_pool, is_small > 0, is_expandable > 0),
            blocks=Blocks(
                address,
                size,
                requested,
                state.astype(np.int8),
                segment,
                label.astype(np.int8),
                place.astype(np.int32),
            ),
            trace=Trace(
                action.astype(np.int8),
                where,
                amount,
                time_us,
                entry_label.astype(np.int8),
                entry_place.astype(np.int32),
                entry_stream,
                pool.astype(np.int32),
            ),
            is_profile=self.is_profile,
        )


def _list(holder: Any, key: str) -> Sequence[Any]:
    value = _mapping(holder).get(key, ())
    if not isinstance(value, list | tuple):
        raise _Complaint(f"{key!r} is {reprlib.repr(value)}. Expected a list.")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Complaint(f"it has {reprlib.repr(value)} in a list. Expected a dictionary.")
    return value


def _text(holder: Any, key: str) -> str:
    value = _mapping(holder).get(key)
    if not isinstance(value, str):
        raise _Complaint(f"{key!r} is {reprlib.repr(value)}. Expected text.")
    return value


def _integer(holder: Any, key: str, default: int | None = None, *, is_address: bool = False) -> int:
    value = _mapping(holder).get(key, default)
    if value is None and is_address:
        return default or 0
    if type(value) is not int:
        raise _Complaint(f"{key!r} is {reprlib.repr(value)}. Expected an integer.")
    if is_address:
        # Torch may write an unsigned address as a signed number, or the reverse.
        return ((value + (1 << 63)) % (1 << 64)) - (1 << 63)
    if not 0 <= value <= _MAX_BYTES:
        raise _Complaint(f"{key!r} is {value}. Expected a number of bytes from 0.")
    return value


def _time(holder: Any) -> int:
    """Time in microseconds; -1 if it is missing or invalid."""
    value = _mapping(holder).get("time_us", -1)
    return value if type(value) is int and 0 <= value < _MAX_TIME_US else -1


def _device(segment: Any) -> int:
    value = _mapping(segment).get("device", 0)
    if type(value) is not int or not 0 <= value <= _MAX_DEVICE:
        raise _Complaint(f"a segment is on device {reprlib.repr(value)}. Expected a number from 0.")
    return value


def _frames(holder: Mapping[str, Any]) -> Sequence[Any]:
    """The stack of the allocation; older versions store it in a history."""
    if "frames" in holder:
        return _list(holder, "frames")
    history = _list(holder, "history")
    return _list(history[0], "frames") if history else ()


def _old_requested(block: Mapping[str, Any], size: int) -> int:
    history = _list(block, "history")
    return _integer(history[0], "real_size", size) if history else size


def _annotation(entry: Any) -> Iterable[Annotation]:
    stage = _text(entry, "stage")
    if stage in ("START", "END"):
        yield Annotation(_time(entry), _text(entry, "name"), stage == "START")


def _old_annotation(entry: Mapping[str, Any]) -> Iterable[Annotation]:
    """Read a trace entry whose only frame is the annotation, with its stage and its name."""
    for frame in _list(entry, "frames")[:1]:
        stage, name = _text(frame, "name"), _text(frame, "filename")
        if stage in ("START", "END"):
            yield Annotation(_time(entry), name, stage == "START")


def _settings(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        return {}
    plain = (str, int, float, bool)
    return {key: str(item)[:1000] for key, item in value.items() if isinstance(item, plain)}
