"""Read traces of other tools as the JSON of a torch.profiler trace.

Each source converts the events of one process. All importers then read the same stream: names of
kernels, units, steps and messages have one owner.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.trace_file import (
    ImportLimits,
    OnProgress,
    check_size,
    peek,
    read_blocks,
)

NOTES_KEY = "fsdpInspectNotes"
"""The key of a converted trace for what its format lacks."""
MARKS_KEY = "fsdpInspectNeedsMarks"
"""The key of a converted trace that contains a whole process, so that its steps must be marked."""
JSON_SUFFIXES = (".json", ".json.gz")
_SOURCES = {".sqlite": "nsight:NsightExport", ".jsonl": "titan_log:TitanLog"}
"""The module and the class that convert a file, by suffix."""
SUFFIXES = (*JSON_SUFFIXES, *_SOURCES)
_ROCPROF, _ROCPROF_START = "rocprof:RocprofJson", b'{"rocprofiler-sdk-tool"'
_HEAD_BYTES = 4096
"""What is searched for the first key of a file."""
_BLOCK_EVENTS = 4096
_OPERATORS = ("aten::", "c10d::", "nccl:", "fsdp::", "autograd::", "record_param_comms")
_ARGUMENTS = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)
"""The arguments that torch appends to the name of an operator."""
_STEP = re.compile(r"(?:train(?:ing)?[_ ])?(?:step|iter(?:ation)?)[ _#:]*(\d{1,9})", re.IGNORECASE)
"""Names of ranges by which trainings mark a step."""


class TraceSource(Protocol):
    """Converts one trace file of another tool."""

    def __init__(self, path: Path) -> None:
        """`path`: the file."""

    def list_processes(self) -> list[int]:
        """The processes of the file, each of which is one rank.

        Raises:
            ImportingError: The file cannot be read, or has no such process.
        """

    def read_events(self, process: int) -> Iterator[dict[str, Any]]:
        """The complete events of one process, in the form of torch.profiler.

        Raises:
            ImportingError: The file is damaged.
        """

    def read_other_values(self, process: int) -> dict[str, Any]:
        """The values beside the events: `distributedInfo`, `baseTimeNanoseconds`, `NOTES_KEY`."""


def source_of(path: Path) -> TraceSource | None:
    """The source of a file; None: it is JSON of torch.profiler."""
    source = _SOURCES.get(path.suffix.lower(), "")
    if path.name.endswith(JSON_SUFFIXES):
        start = b"".join(peek(path)[:_HEAD_BYTES].split())
        source = _ROCPROF if start.startswith(_ROCPROF_START) else source
    module, _, name = source.partition(":")
    if not module:
        return None
    make: type[TraceSource] = getattr(import_module(f"fsdp_inspect.importing.{module}"), name)
    return make(path)


def list_processes(path: Path) -> list[int | None]:
    """The processes of a trace file; None: it has only one, or reading it will state its fault."""
    try:
        source = source_of(path)
        processes = [] if source is None else source.list_processes()
    except ImportingError:
        return [None]
    return [*processes] if len(processes) > 1 else [None]


def read_trace_blocks(
    path: Path, process: int | None, limits: ImportLimits, on_progress: OnProgress | None
) -> Iterator[bytes]:
    """The JSON of one process of a trace file, in blocks.

    Raises:
        ImportingError: The file cannot be read, or exceeds the limits.
    """
    source = source_of(path)
    if source is None:
        yield from read_blocks(path, limits, on_progress)
        return
    if process is None:
        process = source.list_processes()[0]
    values = msgspec.json.encode(source.read_other_values(process))
    yield values[:-1] + (b"," if len(values) > 2 else b"") + b'"traceEvents":['
    packed, count, is_first = path.stat().st_size, 0, True
    events: list[dict[str, Any]] = []
    for event in source.read_events(process):
        events.append(event)
        if len(events) == _BLOCK_EVENTS:
            block = _encode(events, is_first=is_first)
            count, is_first = count + len(block), False
            check_size(path, count, packed, limits)
            yield block
            events.clear()
    yield _encode(events, is_first=is_first) + b"]}"
    if on_progress is not None:
        on_progress(1.0)


def make_event(
    category: str,
    name: str,
    span: tuple[int, int],
    process: int,
    thread: int | str,
    correlation: int | None = None,
) -> dict[str, Any]:
    """An event in the form of torch.profiler; `span`: its start and end in ns."""
    start, end = span
    event = {"ph": "X", "cat": category, "name": name, "ts": start / 1000,
             "dur": (end - start) / 1000, "pid": process, "tid": thread}  # fmt: skip
    return event if correlation is None else event | {"args": {"correlation": correlation}}


def name_range(name: str) -> tuple[str, str]:
    """The category and the name of a range that a training marks with NVTX or ROCTx."""
    plain = _ARGUMENTS.sub("", name)
    step = _STEP.fullmatch(plain)
    category = "cpu_op" if plain.startswith(_OPERATORS) else "user_annotation"
    return category, f"ProfilerStep#{step[1]}" if step else plain


def _encode(events: list[dict[str, Any]], *, is_first: bool) -> bytes:
    inner = msgspec.json.encode(events)[1:-1]
    return inner if is_first or not inner else b"," + inner
