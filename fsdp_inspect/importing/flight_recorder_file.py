"""Read one dump of torch's flight recorder, as pickle or JSON, and check its values.

Versions 2.x of the format, which torch 2.3 and later write. A pickle is read without its classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.formatting import plural
from fsdp_inspect.importing.kernel_names import kind_of
from fsdp_inspect.importing.messages import dtype_code_of_name, read_ranks, read_whole
from fsdp_inspect.importing.snapshot_pickle import read_plain_pickle
from fsdp_inspect.trace.black_box import CodePlace
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, NO_UNIT, UNKNOWN_UNIT, EventKind, Phase
from fsdp_inspect.trace.records import MAX_WORLD_SIZE
from fsdp_inspect.trace.stack_dumps import StackFrame

MAX_FILE_BYTES = 256 << 20
"""A dump of 2,000 collectives with stacks takes 1 to 5 MB."""
MAX_MEMORY_BYTES = 2 << 30
_MAX_SEQUENCE = 1 << 31
_FSDP_FILE = "_fsdp_collectives.py"
_PHASES = (
    (Phase.BACKWARD, ("pre_backward", "post_backward", "backward")),
    (Phase.FORWARD, ("pre_forward", "forward")),
)
"""The phase by a function on the stack; the first phase that matches counts."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a dump."""

    group: str
    group_size: int
    """The group size according to input and output; 0: unknown."""
    sequence: int
    """Position in the group, from 0."""
    kind: EventKind
    unit: int
    """`UNKNOWN_UNIT` if FSDP may have issued it, `NO_UNIT` if its stack shows otherwise."""
    bytes: int
    """Bytes of the larger of input and output; -1: unknown."""
    dtype: int
    time_ns: int
    """Wall time of the issue."""
    completed_ns: int
    """Wall time at which the end was seen; 0: not seen."""
    phase: Phase
    place: CodePlace | None
    """The user's line; None without a stack."""
    has_stack: bool
    is_start_seen: bool = False
    """Whether its start on the device was seen. NCCL looks with TORCH_NCCL_ENABLE_TIMING only."""


@dataclass(frozen=True, slots=True)
class Dump:
    """The collectives of one rank, in the order of issue."""

    backend: str
    groups: Mapping[str, tuple[int, ...]]
    """The ranks of the groups that the dump lists."""
    collectives: tuple[Collective, ...]
    num_left_out: int
    """Entries up to the last one without a valid `record_id`, `collective_seq_id` or
    `process_group`: whether the rank issued that collective is unknown."""

    @property
    def has_stacks(self) -> bool:
        """Whether every collective has a stack. JSON dumps of gloo have none."""
        return all(each.has_stack for each in self.collectives)

    def without_stacks(self) -> Dump:
        """Remove the fields that come from stacks, so that ranks without stacks compare equal."""
        kinds = {EventKind.REDUCE_SCATTER: EventKind.ALL_REDUCE} if self.backend == "gloo" else {}
        plain = (
            replace(each, unit=UNKNOWN_UNIT, kind=kinds.get(each.kind, each.kind))
            for each in self.collectives
        )
        return replace(self, collectives=tuple(plain))

    def unfinished(self) -> Iterator[Collective]:
        """The collectives whose end was not seen, without point-to-point messages."""
        for each in self.collectives:
            if not each.completed_ns and each.kind is not EventKind.POINT_TO_POINT:
                yield each

    def ordered(self, group: str) -> list[Collective]:
        """The collectives of a group, without point-to-point messages."""
        return [
            each
            for each in self.collectives
            if each.group == group and each.kind is not EventKind.POINT_TO_POINT
        ]


def read_dump(path: Path) -> Dump:
    """Read a dump.

    Raises:
        CorruptFileError: The file is too large, cut off, of another version, or no dump.
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise CorruptFileError(
            f"{path.name} has {size:,} bytes. Expected a flight recorder dump of at most "
            f"{MAX_FILE_BYTES:,}. Name another file."
        )
    content = path.read_bytes()
    value = _decode(content, path.name)
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list):
        raise CorruptFileError(
            f"{path.name} is no flight recorder dump: it has no list `entries`. Expected a file "
            "that NCCL's watchdog or torch's _dump_fr_trace wrote."
        )
    version = str(value.get("version", ""))
    if version.partition(".")[0] != "2":
        raise CorruptFileError(
            f"{path.name} has version {version or 'unknown'} of the flight recorder's format. "
            "Expected version 2 (torch 2.3 and later). Update FSDP Inspect."
        )
    found = [_parse(entry) if isinstance(entry, dict) else None for entry in value["entries"]]
    num_left_out = _count_left_out([None if each is None else each[0] for each in found])
    kept = sorted(filter(None, found[num_left_out:]), key=lambda each: each[0])
    if not any(found) and found:
        raise CorruptFileError(
            f"{path.name} lists {plural(len(value['entries']), 'collective')}, but none with a "
            "valid `record_id`, `collective_seq_id` and `process_group`. Expected entries as torch "
            "2.3 and later write them. Write the dump again."
        )
    names = [entry.get("profiling_name") for entry in value["entries"] if isinstance(entry, dict)]
    backend = next((name.partition(":")[0] for name in names if isinstance(name, str)), "unknown")
    return Dump(
        backend,
        dict(_groups(value.get("pg_config"))),
        tuple(each for _, each in kept),
        num_left_out=num_left_out,
    )


def _count_left_out(numbers: Sequence[int | None]) -> int:
    """The entries up to the last unusable one; all, if the others are not in the order of issue."""
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers):
        return 0
    if known != sorted(known):
        return len(numbers)
    return max(at for at, number in enumerate(numbers, 1) if number is None)


def _decode(content: bytes, name: str) -> Any:
    if content.lstrip()[:1] != b"{":
        return read_plain_pickle(content, name, max_memory_bytes=MAX_MEMORY_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{name} is no complete JSON: {error}. Expected a flight recorder dump. Copy the file "
            "again."
        ) from None


def _groups(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The groups that list their ranks, which a dump writes as the text `[0, 1]`."""
    for key, group in config.items() if isinstance(config, dict) else ():
        ranks = read_ranks(group.get("ranks")) if isinstance(group, dict) else None
        if ranks:
            yield str(key or group.get("name") or "0"), tuple(sorted(ranks))


def _parse(entry: Mapping[str, Any]) -> tuple[int, Collective] | None:
    """An entry with its record number; None if its position in its group is missing."""
    number = read_whole(entry.get("record_id"))
    sequence = read_whole(entry.get("collective_seq_id"))
    group = entry.get("process_group")
    name = group[0] if isinstance(group, (list, tuple)) and group else group
    if (
        number is None
        or sequence is None
        or sequence >= _MAX_SEQUENCE
        or not isinstance(name, (str, int))
    ):
        return None
    is_message = entry.get("is_p2p") is True
    operation = str(entry.get("profiling_name", "")).rpartition(":")[2]
    kind = EventKind.POINT_TO_POINT if is_message else kind_of(operation)
    inputs, outputs = _elements(entry, "input_sizes"), _elements(entry, "output_sizes")
    dtype = dtype_code_of_name(_first(entry.get("input_dtypes")))
    itemsize = ITEMSIZE.get(DTYPES[dtype], 0)
    time_ns = read_whole(entry.get("time_created_ns")) or 0
    completed = read_whole(entry.get("time_discovered_completed_ns")) or 0
    if entry.get("state") == "completed":
        completed = completed or time_ns + 1
    frames = list(_frames(entry.get("frames")))
    if kind is EventKind.ALL_REDUCE and _scatters(frames):
        kind = EventKind.REDUCE_SCATTER
    is_gather = kind is EventKind.ALL_GATHER and inputs and outputs % inputs == 0
    group_size = outputs // inputs if is_gather else 0
    return number, Collective(
        group=str(name),
        group_size=group_size if group_size <= MAX_WORLD_SIZE else 0,
        sequence=max(sequence - 1, 0),
        kind=kind,
        unit=NO_UNIT if frames and not _is_of_fsdp(frames) else UNKNOWN_UNIT,
        bytes=max(inputs, outputs) * itemsize if itemsize else -1,
        dtype=dtype,
        time_ns=time_ns,
        completed_ns=completed,
        is_start_seen=entry.get("state") == "started"
        or bool(read_whole(entry.get("time_discovered_started_ns"))),
        phase=_phase(frames),
        place=_place(frames),
        has_stack=bool(frames),
    )


def _elements(entry: Mapping[str, Any], key: str) -> int:
    """The elements of all tensors of a list of shapes; 0 if it is damaged."""
    shapes = entry.get(key)
    total = 0
    for shape in shapes if isinstance(shapes, (list, tuple)) else ():
        if not isinstance(shape, (list, tuple)) or any(type(size) is not int for size in shape):
            return 0
        total += math.prod(shape)
    return total if 0 <= total < 1 << 50 else 0


def _first(values: Any) -> str | None:
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], str):
        return values[0]
    return None


def _frames(frames: Any) -> Iterator[StackFrame]:
    """The frames of a stack, innermost first."""
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        if isinstance(frame, dict) and type(frame.get("line")) is int:
            yield StackFrame(str(frame.get("filename")), frame["line"], str(frame.get("name")))


def _is_of_fsdp(frames: Sequence[StackFrame]) -> bool:
    return any(frame.file.endswith(_FSDP_FILE) for frame in frames)


def _scatters(frames: Sequence[StackFrame]) -> bool:
    """Whether the stack calls a reduce-scatter, which gloo runs and names as an all-reduce."""
    functions = [frame.function.lstrip("_") for frame in frames if frame.is_library]
    return any(function.startswith("reduce_scatter") for function in functions)


def _phase(frames: Sequence[StackFrame]) -> Phase:
    functions = {frame.function.lstrip("_") for frame in frames if frame.is_library}
    for phase, names in _PHASES:
        if functions & set(names):
            return phase
    return Phase.OUTSIDE


def _place(frames: Sequence[StackFrame]) -> CodePlace | None:
    user = next((frame for frame in frames if not frame.is_library), None)
    return None if user is None else CodePlace(user.file, user.line, user.function)
