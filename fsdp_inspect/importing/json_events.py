"""Split a trace file into batches of whole events, without holding the file in memory.

A trace is a JSON object whose `traceEvents` array can be larger than memory (in the older form, the
file is only that array). The array is cut into batches of whole events, of one megabyte each. A
batch is read three times, and this size fits the processor's cache.

[Note: cutting] A batch is cut at a `}, {`. This text may also occur inside a string or inside an
event's own lists. But a prefix of JSON can be parsed in one way only, so a batch that decodes as a
list was cut between events. If a batch does not decode, and at the end of the array, the structure
is scanned exactly: strings, escapes, depth.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.importing.trace_file import CANNOT_DECODE, ImportLimits

EVENTS_KEY = "traceEvents"
STRETCH_BYTES = 1 << 20
_FOREIGN_BYTES = 1 << 20
"""A file without a key of a trace in this much of its beginning is no trace."""
_KNOWN_KEYS = frozenset(
    {
        *("schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit"),
        *("baseTimeNanoseconds", "traceName", "record_shapes", "profile_memory", "with_stack"),
        *("with_flops", "with_modules", "cuda_runtime_version", "cuda_driver_version"),
        *("hip_runtime_version", "hip_driver_version", "cupti_version", "trace_id", "host_name"),
        *("metadata", "otherData", "systemTraceEvents", "samples", "stackFrames"),
    }
)
"""Keys of traces besides the events; other files share at most few of them."""

_GUESSES = 4
_SPACE = re.compile(rb"[ \t\r\n]*")
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_TOKEN = re.compile(rb'["{}\[\]]')
_STRING_END = re.compile(rb'(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR_END = re.compile(rb"[,}\]\s]")


EventT = TypeVar("EventT")
DecodeAll = Callable[[bytes], list[EventT]]
"""Decodes a JSON array of events, or raises one of `CANNOT_DECODE`."""
DecodeOne = Callable[[bytes], EventT | None]
"""Decodes one unusual event; None leaves it out. Raises ValueError or RecursionError if the bytes
are not JSON."""


class EventReader:
    """Read one trace: its events in batches, and the other values of the object."""

    def __init__(self, blocks: Iterator[bytes], name: str, limits: ImportLimits) -> None:
        """Prepare to read; this reads no block.

        Args:
            blocks: The unpacked content.
            name: The file's name, for messages.
            limits: Contain the largest size of one event.
        """
        self.other_values: dict[str, Any] = {}
        """The other values of the trace by key; complete when `batches` has ended."""
        self._blocks = blocks
        self._name = name
        self._limits = limits
        self._buffer = b""
        self._at = 0
        """Number of consumed bytes of the buffer."""
        self._buffer_offset = 0
        """Offset of the buffer in the content."""
        self._has_events = False
        self._open_key = ""
        """The key whose value is read."""

    def batches(
        self, decode_all: DecodeAll[EventT], decode_one: DecodeOne[EventT]
    ) -> Iterator[list[EventT]]:
        """Yield the events in batches, in the order of the file.

        Raises:
            ImportingError: The file is not a trace, is malformed or cut off, or an event is larger
                than the limit.
        """
        first = self._peek()
        if first == b"[":
            self._at += 1
            if self._peek() not in (b"{", b"]"):
                raise self._odd("has", "an array of events, each of which is an object")
            yield from self._events(decode_all, decode_one)
            return
        if first != b"{":
            raise self._odd(
                "begins with", "a JSON object or array, or a pickle of protocol 2 or later"
            )
        self._at += 1
        while self._peek() != b"}":
            if self._key() == EVENTS_KEY:
                self._expect(b"[")
                yield from self._events(decode_all, decode_one)
            if self._peek() == b",":
                self._at += 1
        if not self._has_events:
            raise ImportingError(
                f"{self._name} is JSON without {EVENTS_KEY!r}: it has "
                f"{', '.join(map(repr, list(self.other_values)[:5])) or 'no keys'}. Expected a "
                "trace written by torch.profiler. Export one with prof.export_chrome_trace(path)."
            )

    # --- other values than the events

    def _key(self) -> str:
        """Read the next key; also its value, except for the key of the events."""
        self._expect(b'"')
        key = self._take(self._find_string_end)
        name = self._open_key = str(self._decode_value(b'"' + key))
        self._expect(b":")
        if name != EVENTS_KEY:
            self._peek()
            self.other_values[name] = self._decode_value(self._take(self._find_value_end))
            self._check_foreign(self._offset)
        return name

    def _check_foreign(self, num_bytes: int) -> None:
        """Reject a file that has no key of a trace in its first megabyte.

        Args:
            num_bytes: The bytes without such a key.

        Raises:
            ImportingError: The file is not a trace.
        """
        if self._has_events or num_bytes < _FOREIGN_BYTES or not self._is_foreign:
            return
        keys = list(dict.fromkeys([*self.other_values, self._open_key]))
        raise ImportingError(
            f"{self._name} is JSON, but not a trace: its first megabyte has no {EVENTS_KEY!r}, but "
            f"{', '.join(map(repr, keys[:5]))}. Expected a "
            "trace written by torch.profiler. Export one with prof.export_chrome_trace(path)."
        )

    @property
    def _is_foreign(self) -> bool:
        known = _KNOWN_KEYS.intersection([*self.other_values, self._open_key])
        return not known

    def _find_string_end(self) -> int | None:
        found = _STRING_END.match(self._buffer, self._at)
        return found.end() if found else None

    def _find_value_end(self) -> int | None:
        head = self._buffer[self._at : self._at + 1]
        if head == b'"':
            found = _STRING_END.match(self._buffer, self._at + 1)
            return found.end() if found else None
        if head not in (b"{", b"["):
            found = _SCALAR_END.search(self._buffer, self._at)
            return found.start() if found else None
        return self._find_bracket_end()

    def _find_bracket_end(self) -> int | None:
        depth, at = 0, self._at
        while found := _TOKEN.search(self._buffer, at):
            at = found.end()
            if found[0] == b'"':
                string = _STRING_END.match(self._buffer, at)
                if string is None:
                    return None
                at = string.end()
                continue
            depth += 1 if found[0] in b"{[" else -1
            if depth == 0:
                return at
        return None

    def _take(self, find_end: Callable[[], int | None]) -> bytes:
        """Take the bytes up to an end that may lie after the bytes read so far."""
        while True:
            end = find_end()
            if end is not None:
                taken = self._buffer[self._at : end]
                self._at = end
                return taken
            self._check_size("A value")
            self._check_foreign(self._num_waiting)
            if not self._fill(2 * self._num_waiting + 1):
                raise self._truncated()

    def _decode_value(self, raw: bytes) -> Any:
        try:
            return json.loads(raw.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError) as error:
            raise self._malformed(self._offset, error) from error

    # --- the events

    def _events(
        self, decode_all: DecodeAll[EventT], decode_one: DecodeOne[EventT]
    ) -> Iterator[list[EventT]]:
        self._has_events = True
        wanted = STRETCH_BYTES
        while not self._ends_array():
            self._fill(wanted)
            events = self._guess(decode_all)
            if events is None:
                events = self._scan(decode_all, decode_one)
            if events is None:
                self._check_size("An event")
                if self._num_waiting < wanted:
                    raise self._truncated()
                wanted *= 2
                continue
            wanted = STRETCH_BYTES
            yield events
            del events  # free this batch before the next: two batches do not fit the cache

    def _ends_array(self) -> bool:
        if self._peek() == b",":
            self._at += 1
        if self._peek() != b"]":
            return False
        self._at += 1
        return True

    def _guess(self, decode_all: DecodeAll[EventT]) -> list[EventT] | None:
        """Decode the batch up to a `}, {`; None if none of the last positions decodes."""
        if self._num_waiting < STRETCH_BYTES:
            return None
        at = len(self._buffer)
        for _ in range(_GUESSES):
            at = self._buffer.rfind(b"}", self._at, at)
            if at < 0:
                return None
            if _BETWEEN.match(self._buffer, at) is None:
                continue
            try:
                whole = memoryview(self._buffer)[self._at : at + 1]
                events = decode_all(b"".join((b"[", whole, b"]")))
            except CANNOT_DECODE:
                return None
            self._at = at + 1
            return events
        return None

    def _scan(
        self, decode_all: DecodeAll[EventT], decode_one: DecodeOne[EventT]
    ) -> list[EventT] | None:
        """Decode all whole events in the buffer after an exact scan; None without a whole event."""
        ends = find_event_ends(self._buffer[self._at :]) + self._at
        if len(ends) == 0:
            return None
        last = int(ends[-1])
        try:
            events = decode_all(b"[" + self._buffer[self._at : last] + b"]")
        except CANNOT_DECODE:
            events = self._decode_each(ends, decode_one)
        self._at = last
        return events

    def _decode_each(self, ends: NDArray[np.int64], decode_one: DecodeOne[EventT]) -> list[EventT]:
        events: list[EventT] = []
        start = self._at
        for end in ends.tolist():
            piece = self._buffer[start:end].lstrip(b", \t\r\n")
            try:
                event = decode_one(piece)
            except (ValueError, RecursionError) as error:
                raise self._malformed(self._buffer_offset + start, error) from error
            if event is not None:
                events.append(event)
            start = end
        return events

    # --- the buffer

    @property
    def _offset(self) -> int:
        """Number of consumed bytes of the content."""
        return self._buffer_offset + self._at

    @property
    def _num_waiting(self) -> int:
        return len(self._buffer) - self._at

    def _peek(self) -> bytes:
        """The next byte that is not white space, without consuming it."""
        while True:
            self._skip_space()
            if self._offset == 0 and self._buffer.startswith(b"\xef\xbb\xbf"):
                self._at = len(b"\xef\xbb\xbf")
                self._skip_space()
            if self._num_waiting:
                return self._buffer[self._at : self._at + 1]
            if not self._fill(1):
                raise self._truncated()

    def _skip_space(self) -> None:
        found = _SPACE.match(self._buffer, self._at)
        self._at = found.end() if found else self._at

    def _expect(self, byte: bytes) -> None:
        if self._peek() != byte:
            raise self._odd("has", repr(byte.decode()))
        self._at += 1

    def _fill(self, wanted: int) -> bool:
        """Read until `wanted` bytes are in the buffer; False at the end of the content."""
        blocks: list[bytes] = []
        waiting = self._num_waiting
        while waiting < wanted and (block := next(self._blocks, b"")):
            blocks.append(block)
            waiting += len(block)
        if not blocks:
            return False
        self._buffer = b"".join((memoryview(self._buffer)[self._at :], *blocks))
        self._buffer_offset += self._at
        self._at = 0
        return True

    # --- errors

    def _check_size(self, what: str) -> None:
        if self._num_waiting > self._limits.max_event_bytes:
            raise ImportingError(
                f"{what} of {self._name}, at byte {self._offset:,}, is larger than "
                f"{format_bytes(self._limits.max_event_bytes)}. Expected a few kilobytes. The file "
                "is damaged or not a trace: export it again."
            )

    def _odd(self, verb: str, expected: str) -> ImportingError:
        found = self._buffer[self._at : self._at + 16].decode("utf-8", "replace")
        return ImportingError(
            f"{self._name} {verb} {found!r} at byte {self._offset:,}. Expected {expected}. Export "
            "the trace again with prof.export_chrome_trace(path)."
        )

    def _truncated(self) -> ImportingError:
        return ImportingError(
            f"{self._name} is cut off at byte {self._offset + self._num_waiting:,}. Expected a "
            "complete trace, which ends with a closing bracket. Copy it again from where it was "
            "written; a killed profiler leaves such files."
        )

    def _malformed(self, offset: int, error: BaseException) -> ImportingError:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if "integer string conversion" in why:
            why = "a number with thousands of digits"
        return ImportingError(
            f"{self._name} has invalid JSON at byte {offset:,}: {why.rstrip('.')}. Expected a "
            "trace written by torch.profiler. Export it again; if you edited it, undo the edit."
        )


def find_event_ends(buffer: bytes) -> NDArray[np.int64]:
    """Find the ends of the whole events at the front of a part of an array.

    Args:
        buffer: Begins between two events or before the first; may continue after the array.

    Returns:
        Shape (n,): the positions after their closing brackets; none after the array's own `]`.
    """
    content = np.frombuffer(buffer, dtype=np.uint8)
    quotes = np.flatnonzero(content == ord('"'))
    if b"\\" in buffer:
        quotes = quotes[~_is_escaped(content, quotes)]
    opens = np.flatnonzero((content == ord("{")) | (content == ord("[")))
    closes = np.flatnonzero((content == ord("}")) | (content == ord("]")))
    places = np.concatenate([opens, closes])
    change = np.concatenate([np.ones(len(opens), np.int64), np.full(len(closes), -1, np.int64)])
    outside = np.searchsorted(quotes, places) % 2 == 0
    order = np.argsort(places[outside], kind="stable")
    places, change = places[outside][order], change[outside][order]
    depth = np.cumsum(change)
    beyond = np.flatnonzero(depth < 0)
    if len(beyond):
        places, change, depth = (one[: beyond[0]] for one in (places, change, depth))
    return np.asarray(places[(depth == 0) & (change < 0)] + 1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of backslashes: the end and the length of each run."""

    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]


def _is_escaped(content: NDArray[np.uint8], quotes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the quotes with an odd number of backslashes before them."""
    runs = _backslash_runs(np.flatnonzero(content == ord("\\")))
    found = np.searchsorted(runs.ends, quotes - 1)
    found = np.minimum(found, len(runs.ends) - 1)
    is_odd = runs.lengths[found] % 2 == 1
    return np.asarray((runs.ends[found] == quotes - 1) & is_odd, dtype=bool)


def _backslash_runs(places: NDArray[np.int64]) -> _Runs:
    breaks = np.flatnonzero(np.diff(places) != 1)
    last = np.append(breaks, len(places) - 1)
    first = np.concatenate([[0], breaks + 1])
    return _Runs(places[last], last - first + 1)
