"""Read the JSON logs of NCCL Inspector, the profiler plugin of NCCL (and RCCL).

Each process writes one line for each completed collective: its communicator, its number among those
of its kind, the message of one rank, and the time of its kernel. The format v4.0 is that of NCCL
2.28.3 to 2.30. It has neither algorithm nor protocol.
Source: NVIDIA/nccl, plugins/profiler/inspector (formerly ext-profiler/inspector).
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.trace_file import read_json_lines
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.records import MAX_NS, MAX_WORLD_SIZE

KINDS = {
    "AllGather": EventKind.ALL_GATHER,
    "ReduceScatter": EventKind.REDUCE_SCATTER,
    "AllReduce": EventKind.ALL_REDUCE,
}
"""The collectives that FSDP issues, by their names in a log."""
_FIELDS = ("number", "bytes", "time_ns", "nccl_ns", "channels")
_RATES = ("algorithm", "bus")
_DTYPE = [
    *((name, "i8") for name in _FIELDS),
    *((name, "f8") for name in _RATES),
    ("timing", "U16"),
]


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int
    comm_name: str = ""


class _Metadata(msgspec.Struct):
    hostname: str
    pid: int
    dump_timestamp_us: int


class _Channel(msgspec.Struct):
    kernel_stop_ts: int


class _Trace(msgspec.Struct):
    kernel_events: list[_Channel] = []


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: int
    coll_algobw_gbs: float
    coll_busbw_gbs: float
    coll_timing_source: str = ""
    event_trace_ts: _Trace = msgspec.field(default_factory=_Trace)


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None


@dataclass(frozen=True, slots=True)
class CollectiveLog:
    """The collectives of one kind on one communicator, as one rank logged them."""

    process: tuple[str, int]
    """Host and pid."""
    communicator: str
    """Its hash, which its ranks share, and its name, if it has one."""
    rank: int
    """The rank in the communicator."""
    num_ranks: int
    kind: int
    """An `EventKind`."""
    rows: NDArray[Any]
    """By `number`: `bytes` of the full message, `time_ns` (wall time after the end), `nccl_ns`,
    `channels` (0: the log is not verbose), `algorithm` and `bus` (bytes/s), and `timing`, the clock
    of `nccl_ns`, such as `kernel_gpu`."""


def read_logs(path: Path) -> tuple[list[CollectiveLog], list[str]]:
    """Read a log, or the logs (`*.log`) of a folder and its folders.

    Returns:
        The logs, and a sentence for each file that cannot be read.

    Raises:
        ImportingError: No file can be read.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.log"))
    rows: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    faults = []
    for file in files:
        try:
            for line in read_json_lines(file, _Line, "a JSON log of NCCL Inspector"):
                _add(rows, line)
        except ImportingError as error:
            faults.append(str(error))
    if len(faults) == len(files):
        raise ImportingError(
            f"{faults[0] if faults else f'{path} has no log of NCCL Inspector.'} Expected the files"
            " HOST-pidPID.log of the folder NCCL_INSPECTOR_DUMP_DIR. Choose that folder."
        )
    return [_make_log(*each) for each in sorted(rows.items())], faults


def _make_log(key: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> CollectiveLog:
    table = np.array(rows, dtype=_DTYPE)
    first = np.unique(table["number"], return_index=True)[1]
    process, communicator, rank, num_ranks, kind = key
    return CollectiveLog(process, communicator, rank, num_ranks, kind, table[first])


def _add(rows: dict[tuple[Any, ...], list[tuple[Any, ...]]], line: _Line) -> None:
    found, header, metadata = line.coll_perf, line.header, line.metadata
    if found is None or found.coll not in KINDS or not 0 < header.n_ranks <= MAX_WORLD_SIZE:
        return
    kind = KINDS[found.coll]
    size = found.coll_msg_size_bytes * (1 if kind == EventKind.ALL_REDUCE else header.n_ranks)
    channels = found.event_trace_ts.kernel_events
    stop_us = max((each.kernel_stop_ts for each in channels), default=0)
    times = ((stop_us or metadata.dump_timestamp_us) * 1000, found.coll_exec_time_us * 1000)
    values = (found.coll_sn, size, *times, len(channels))
    if all(0 <= value <= MAX_NS for value in values):
        name = f" ({header.comm_name})" if header.comm_name not in ("", "unknown") else ""
        who = ((metadata.hostname, metadata.pid), header.id + name, header.rank, header.n_ranks)
        rates = (found.coll_algobw_gbs * 1e9, found.coll_busbw_gbs * 1e9)
        rows[*who, int(kind)].append((*values, *rates, found.coll_timing_source))
