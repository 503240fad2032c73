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
from fsdp_inspect.trace.records import MAX_INDEX, MAX_NS, MAX_WORLD_SIZE

_KINDS = {
    "AllGather": EventKind.ALL_GATHER,
    "ReduceScatter": EventKind.REDUCE_SCATTER,
    "AllReduce": EventKind.ALL_REDUCE,
}
_NUMBERS = ("number", "bytes", "time_ns", "nccl_ns", "channels")
_RATES = ("algorithm", "bus")
_DTYPE = [
    *((name, "i8") for name in _NUMBERS),
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


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: int
    coll_algobw_gbs: float
    coll_busbw_gbs: float
    coll_timing_source: str = ""
    event_trace_ts: dict[str, int | list[dict[str, int]]] = {}


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
    kind: EventKind
    rows: NDArray[Any]
    """By `number`: `bytes` of the full message, `time_ns` (wall time after the end), `nccl_ns` with
    its clock `timing`, such as `kernel_gpu`, `channels` (0: the log is not verbose), and the rates
    `algorithm` and `bus` in bytes/s."""


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
    logs = []
    for (process, communicator, rank, num_ranks, kind), each in sorted(rows.items()):
        table = np.array(each, dtype=_DTYPE)
        table = table[np.unique(table["number"], return_index=True)[1]]
        table = table[table["number"] - table["number"][0] <= MAX_INDEX]
        logs.append(CollectiveLog(process, communicator, rank, num_ranks, kind, table))
    return logs, faults


def _add(rows: dict[tuple[Any, ...], list[tuple[Any, ...]]], line: _Line) -> None:
    done, header, metadata = line.coll_perf, line.header, line.metadata
    if done is None or done.coll not in _KINDS or not 0 < header.n_ranks <= MAX_WORLD_SIZE:
        return
    kind = _KINDS[done.coll]
    size = done.coll_msg_size_bytes * (1 if kind == EventKind.ALL_REDUCE else header.n_ranks)
    trace = done.event_trace_ts.get("kernel_events")
    stops = [each.get("kernel_stop_ts", 0) for each in trace] if isinstance(trace, list) else []
    time_us = max(stops, default=0) or metadata.dump_timestamp_us
    numbers = (done.coll_sn, size, time_us * 1000, done.coll_exec_time_us * 1000, len(stops))
    if all(0 <= number <= MAX_NS for number in numbers):
        name = f" ({header.comm_name})" if header.comm_name not in ("", "unknown") else ""
        process = (metadata.hostname, metadata.pid)
        rates = (done.coll_algobw_gbs * 1e9, done.coll_busbw_gbs * 1e9)
        rows[process, header.id + name, header.rank, header.n_ranks, kind].append(
            (*numbers, *rates, done.coll_timing_source)
        )
