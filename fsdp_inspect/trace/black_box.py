"""Define the black box: the last collectives of one rank, in a buffer of fixed size.

The recorder writes each collective into a ring before it calls torch, and its end when the end is
known. A small process copies the ring into the rank's folder as `black_box.bin`. The file has three
parts, all numbers are little-endian:

====== ================== =====================================================================
offset size               contents
====== ================== =====================================================================
0      `HEADER_BYTES`     `HEADER`: the rank, its position and its last signs of life
512    `RING_BYTES`       `CAPACITY` entries of `ENTRY`; entry `number` is at `number % CAPACITY`
262656 up to `TEXT_BYTES` JSON lines: the process groups and the lines of code that entries name
====== ================== =====================================================================

[Note: Why the ring is not a memory-mapped file]
A write to a mapped page of a file can wait for the disk: for the journal of ext4, or for the server
of NFS. Then a slow disk stops the training. The ring is in memory that a small process shares
(`recording.black_box_keeper`). Every second it writes the changed bytes. It writes once more after
the rank has ended, by an exit, an abort or SIGKILL. The last second is lost only if that process is
killed with the rank. A rank that hangs changes nothing any more, so its file is exact.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"FSDPIBB1"
HEADER_BYTES = 512
CAPACITY = 4096
"""Entries of the ring: a step of 100 units with gradient accumulation has some hundreds."""
TEXT_BYTES = 128 << 10

ENTRY = np.dtype(
    [
        ("issued_ns", "<i8"),
        ("finished_ns", "<i8"),
        ("bytes", "<i8"),
        ("digest", "<u8"),
        ("number", "<u8"),
        ("sequence", "<i4"),
        ("step", "<i4"),
        ("unit", "<i4"),
        ("place", "<u2"),
        ("group", "<u2"),
        ("microbatch", "<u2"),
        ("kind", "u1"),
        ("phase", "u1"),
        ("dtype", "u1"),
        ("state", "u1"),
        ("unused", "<u2"),
    ]
)
"""One collective.

`issued_ns` and `finished_ns` are on the rank's clock; a `finished_ns` of 0 means that its end was
not seen. `number` counts the rank's collectives from 1. `sequence` counts the collectives of the
process group from 0; point-to-point messages have -1. `digest` is the running digest of the group's
order and steps up to this entry, without those of another `state` than 0. `place` is the line of
code that issued it, 0: unknown. `state` is 1 if another thread than the training thread issued it,
and 2 inside torch's `Join`."""
ENTRY_STRUCT = struct.Struct("<qqqQQiiiHHHBBBBH")
assert ENTRY_STRUCT.size == ENTRY.itemsize
FINISHED_OFFSET = 8
"""Offset of `finished_ns` in an entry."""
RING_BYTES = CAPACITY * ENTRY.itemsize
TEXT_START = HEADER_BYTES + RING_BYTES
MAX_BYTES = TEXT_START + TEXT_BYTES

EXIT_OFFSET = 248
"""Offset of 1 + the code of `os._exit`; 0: the rank has not called it."""
ENDED_OFFSET = 256
"""Offset of the wall time, ns, at which the keeper saw the process end; 0: it had not ended."""
WATCHED_OFFSET = 264
"""Offset of `WATCHED_STRUCT`, the keeper's last observation of the process."""
WATCHED_STRUCT = struct.Struct("<qqqqc7x")
COLLECTION_OFFSET = 304
"""Offset of the wall time, ns, at which a garbage collection of all generations began, 0: none
runs. `COLLECTION_PLACE_BYTES` follow with the user's line, padded with zeros."""
COLLECTION_PLACE_BYTES = 192
TEXT_BYTES_OFFSET = 24
"""Offset of the length of the text in the header."""
STEP_OFFSET = 88
"""Offset of the step in the header."""
CLOSED_OFFSET = 97
"""Offset of `is_closed` in the header."""
HEADER_STRUCT = struct.Struct("<8sIIIIqQqqqqqqiiBBHIqqii")
_TIME = struct.Struct("<q")
_LAYOUT_FIELDS = ("magic", "entry_bytes", "capacity", "text_bytes")
"""The fields that are no attribute of a `Header`."""
_HEADER_FIELDS = (
    "magic",
    "entry_bytes",
    "capacity",
    "rank",
    "pid",
    "text_bytes",
    "num_issued",
    "num_finished",
    "sign_ns",
    "sign_unix_ns",
    "changed_ns",
    "loader_ended_ns",
    "hang_seen_ns",
    "step",
    "unit",
    "phase",
    "is_closed",
    "loader_ended_step",
    "oom_kills",
    "hang_after_ns",
    "num_batches",
    "num_loader_passes",
    "last_ended_pass",
)
_values_of = attrgetter(*(name for name in _HEADER_FIELDS if name not in _LAYOUT_FIELDS))
"""The fields of a `Header`, in the order of `_HEADER_FIELDS`; one call, because the watchdog
encodes five headers a second."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The state of the process when the keeper last looked at it from outside."""

    unix_ns: int
    """The time of the look; 0: never."""
    major_faults: int
    """Pages that the process had to read from a disk since its collectives last changed."""
    still_ns: int
    """The time for which its collectives had not changed."""
    swap_bytes: int
    """Memory of the process that is swapped out."""
    state: str
    """The state of the main thread, as in proc(5): R running, S sleeping, D waiting for a device, T
    stopped. Empty: unknown."""


NOT_WATCHED = Watched(0, 0, 0, 0, "")


@dataclass(frozen=True, slots=True)
class Collection:
    """A garbage collection of all generations that runs."""

    began_unix_ns: int
    place: str
    """The user's line, `file:line`; empty without one."""


@dataclass(frozen=True, slots=True)
class Header:
    """The state of a rank when its black box was last written. Times are on its clock, 0: none."""

    rank: int
    pid: int
    num_issued: int
    """Collectives since the recording began."""
    num_finished: int
    sign_ns: int
    """The last time at which the background thread ran."""
    sign_unix_ns: int
    """The same moment as wall time."""
    changed_ns: int
    """The last time at which that thread saw progress: a collective issued or finished, or a
    step ended."""
    loader_ended_ns: int
    """The time at which the training's data loader last ended."""
    loader_ended_step: int
    hang_seen_ns: int
    """The time at which the watchdog reported that nothing moves; 0: never, or progress
    continued."""
    step: int
    unit: int
    """The innermost running unit; -1: none."""
    phase: int
    is_closed: bool
    """Whether the recording ended in order."""
    oom_kills: int
    """Processes of this machine's cgroup that the kernel killed for memory since the start."""
    hang_after_ns: int
    """The time that the watchdog waits."""
    num_batches: int = 0
    """Batches that data loaders gave to the training thread, in all passes."""
    num_loader_passes: int = 0
    """Passes over data loaders that have begun; 0: none was seen."""
    last_ended_pass: int = 0
    """The number of passes that had begun when a pass last ended."""
    ended_unix_ns: int = 0
    """Wall time at which the process ended; 0: it had not ended, or its end was not seen."""
    exit_code: int | None = None
    """The code with which the rank called `os._exit`; None: it did not."""
    watched: Watched = NOT_WATCHED
    collection: Collection | None = None
    """None: no garbage collection of all generations ran."""

    @property
    def has_no_batch_left(self) -> bool:
        """Whether the last pass over a data loader has ended, and no other one has begun."""
        return 0 < self.num_loader_passes == self.last_ended_pass

    @property
    def hang_seen_unix_ns(self) -> int:
        """The wall time of `hang_seen_ns`; 0: no hang was seen."""
        return self.unix_of(self.hang_seen_ns) if self.hang_seen_ns else 0

    def unix_of(self, time_ns: int) -> int:
        """The wall time of a time on the clock of the rank."""
        return self.sign_unix_ns - (self.sign_ns - time_ns)


EMPTY_HEADER = Header(
    **{  # type: ignore[arg-type]
        name: 0 for name in _HEADER_FIELDS if name in Header.__slots__
    }
)
"""The header of a rank without any known value."""


@dataclass(frozen=True, slots=True)
class CodePlace:
    """The line of code that issued a collective."""

    file: str
    line: int
    function: str
    inner: str = ""
    """The line in a library that the user's line called, as `modeling_llama.py:312`; empty: none.
    """
    loop: str = ""
    """The user's innermost line outside of every module's forward, as `train.py:40`; empty: it is
    this line, or there is none."""

    @property
    def loop_line(self) -> str:
        """The line of the training loop that led here."""
        return self.loop or str(self)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group in the numbering of the rank."""

    name: str
    ranks: tuple[int, ...]


class BlackBoxError(ValueError):
    """The bytes are not a black box of this version."""


@dataclass(frozen=True)
class BlackBox:
    """The contents of one rank's black box."""

    header: Header
    entries: NDArray[np.void]
    """`ENTRY` rows in the order of issue, oldest first."""
    groups: dict[int, Communicator]
    """The process groups, by `group` of the entries."""
    places: dict[int, CodePlace]
    """The lines of code, by `place` of the entries."""

    def of_group(self, name: str) -> NDArray[np.void]:
        """The entries of a communicator, in the order of issue, without point-to-point."""
        numbers = [number for number, group in self.groups.items() if group.name == name]
        entries = self.entries
        chosen: NDArray[np.void] = entries[
            np.isin(entries["group"], numbers) & (entries["sequence"] >= 0)
        ]
        return chosen


def decode(content: bytes | bytearray) -> BlackBox:
    """Read a black box; entries and lines of text that a kill cut off are left out.

    Raises:
        BlackBoxError: The bytes are not a black box, or have another version.
    """
    if len(content) < HEADER_BYTES:
        raise BlackBoxError(
            f"{len(content)} bytes; expected at least the {HEADER_BYTES} bytes of a header"
        )
    fields = dict(zip(_HEADER_FIELDS, HEADER_STRUCT.unpack_from(content), strict=True))
    layout = fields.pop("magic"), fields.pop("entry_bytes"), fields.pop("capacity")
    if layout != (MAGIC, ENTRY.itemsize, CAPACITY):
        raise BlackBoxError("the header does not have the mark of this version")
    text_bytes = fields.pop("text_bytes")
    fields["is_closed"] = bool(fields["is_closed"])
    (ended,) = _TIME.unpack_from(content, ENDED_OFFSET)
    (left,) = _TIME.unpack_from(content, EXIT_OFFSET)
    header = Header(
        **fields,
        ended_unix_ns=ended,
        exit_code=left - 1 if left > 0 else None,
        watched=_decode_watched(content),
        collection=_decode_collection(content),
    )
    text = bytes(content[TEXT_START : TEXT_START + max(min(text_bytes, TEXT_BYTES), 0)])
    groups, places = _decode_text(text)
    return BlackBox(header, _decode_entries(content, header), groups, places)


def encode(box: BlackBox) -> bytes:
    """Encode a whole black box as bytes, which `decode` reads.

    Text beyond `TEXT_BYTES` is left out: first the lines of code, then process groups.
    """
    lines = [
        *(encode_group(index, group) for index, group in box.groups.items()),
        *(encode_place(index, place) for index, place in box.places.items()),
    ]
    text = b""
    for line in lines:
        if len(text) + len(line) <= TEXT_BYTES:
            text += line
    content = bytearray(encode_header(box.header, len(text)).ljust(TEXT_START, b"\0") + text)
    for row in box.entries:
        start = HEADER_BYTES + int(row["number"]) % CAPACITY * ENTRY.itemsize
        content[start : start + ENTRY.itemsize] = row.tobytes()
    return bytes(content)


def encode_header(header: Header, text_bytes: int) -> bytes:
    """Encode the header."""
    rank, pid, *others = _values_of(header)
    layout = MAGIC, ENTRY.itemsize, CAPACITY
    return HEADER_STRUCT.pack(*layout, rank, pid, text_bytes, *others)


def encode_collection(began_unix_ns: int, place: str) -> bytes:
    """Encode a running garbage collection; 0 and an empty place: none runs."""
    return _TIME.pack(began_unix_ns) + place.encode()[:COLLECTION_PLACE_BYTES].ljust(
        COLLECTION_PLACE_BYTES, b"\0"
    )


def _decode_watched(content: bytes | bytearray) -> Watched:
    unix, faults, still, swap, state = WATCHED_STRUCT.unpack_from(content, WATCHED_OFFSET)
    return Watched(unix, faults, still, swap, state.decode("ascii", "replace").strip("\0"))


def _decode_collection(content: bytes | bytearray) -> Collection | None:
    (began,) = _TIME.unpack_from(content, COLLECTION_OFFSET)
    start = COLLECTION_OFFSET + _TIME.size
    place = bytes(content[start : start + COLLECTION_PLACE_BYTES]).partition(b"\0")[0]
    return Collection(began, place.decode(errors="replace")) if began > 0 else None


def encode_group(index: int, group: Communicator) -> bytes:
    """The line of text that describes a process group."""
    return _line({"group": index, "name": group.name, "ranks": list(group.ranks)})


def encode_place(index: int, place: CodePlace) -> bytes:
    """The line of text that describes a place in the code."""
    known = {"file": place.file, "line": place.line, "function": place.function}
    return _line({"place": index, **known, "inner": place.inner, "loop": place.loop})


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _decode_entries(content: bytes | bytearray, header: Header) -> NDArray[np.void]:
    available = max(min(len(content) - HEADER_BYTES, RING_BYTES), 0) // ENTRY.itemsize
    entries: NDArray[np.void] = np.frombuffer(bytes(content), ENTRY, available, HEADER_BYTES)
    entries = entries[entries["number"] > 0]
    if len(entries):  # a torn write may leave entries of the previous round
        newest = int(entries["number"].max())
        entries = entries[entries["number"] + CAPACITY > newest]
    ordered: NDArray[np.void] = entries[np.argsort(entries["number"], kind="stable")]
    return ordered


def _decode_text(text: bytes) -> tuple[dict[int, Communicator], dict[int, CodePlace]]:
    groups, places = {}, {}
    for fields in _read_lines(text.split(b"\n")[:-1]):
        try:
            if "group" in fields:
                ranks = tuple(int(rank) for rank in fields["ranks"])
                groups[int(fields["group"])] = Communicator(str(fields["name"]), ranks)
            elif "place" in fields:
                place = CodePlace(
                    str(fields["file"]),
                    int(fields["line"]),
                    str(fields["function"]),
                    str(fields["inner"]),
                    str(fields.get("loop", "")),
                )
                places[int(fields["place"])] = place
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return groups, places


def _read_lines(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            yield fields
