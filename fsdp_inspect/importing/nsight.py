"""Convert the SQLite export of Nsight Systems to the events of a torch.profiler trace.

`nsys export --type sqlite` writes one table for each kind of event. Kernels, copies and calls of
the CUDA API have the same facts as in a trace of torch.profiler. NVTX ranges stand for operators
and annotations: torch writes them under `torch.autograd.profiler.emit_nvtx` and `nsys profile
--pytorch=autograd-nvtx`, with FSDP's ranges among them. A report of several processes is one rank
for each process that ran kernels. Source: Nsight Systems, "SQLite Schema Reference"; tried on
exports of version 2026.2.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import plural
from fsdp_inspect.importing.trace_sources import NOTES_KEY, make_event, name_range

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
"""One row for each launch of a CUDA graph, unless nsys traced its nodes as kernels."""
_SHIFT = 1 << 24
"""A `globalTid` has the thread in its lowest 24 bits, then the process."""
_RANGES = (59, 60)
"""The `eventType` of a range: push and pop, start and end."""
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}

Event = dict[str, Any]


class NsightExport:
    """One export; see `trace_sources.TraceSource`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def list_processes(self) -> list[int]:
        """The processes that ran kernels, by their first device, then their number."""
        with closing(_open(self._path)) as database:
            return [number for number, _ in _processes(database, self._path.name)]

    def read_events(self, process: int) -> Iterator[Event]:
        """The events of one process."""
        with closing(_open(self._path)) as database:
            try:
                yield from _kernels(database, process)
                yield from _graphs(database, process)
                yield from _copies(database, process)
                yield from _calls(database, process)
                yield from _ranges(database, process)
            except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
                raise _damaged(self._path.name, error) from error

    def read_other_values(self, process: int) -> Event:
        """The base time, the host, the device and the notes."""
        with closing(_open(self._path)) as database:
            try:
                devices = dict(_processes(database, self._path.name))
                found = _other_values(database, devices.get(process))
                found[NOTES_KEY] += _note_graphs(database, process)
                return found
            except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
                raise _damaged(self._path.name, error) from error


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    database.execute("PRAGMA trusted_schema = OFF")
    return database


def _damaged(name: str, error: Exception) -> ImportingError:
    return ImportingError(
        f"{name} cannot be read: {error}. Expected a complete SQLite export of Nsight Systems. "
        "Export the report again: nsys export --type sqlite report.nsys-rep"
    )


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    """The columns of a table; empty if it is missing, or a view."""
    is_table = database.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
    ).fetchone()
    rows = database.execute("SELECT name FROM pragma_table_info(?)", (table,)) if is_table else ()
    return {name for (name,) in rows}


def _processes(database: sqlite3.Connection, name: str) -> list[tuple[int, int]]:
    """The process and the device with most kernels of each process; process 0: unknown."""
    try:
        columns = _columns(database, _KERNELS)
        number = f"globalPid / {_SHIFT} % {_SHIFT}" if "globalPid" in columns else "0"
        rows = database.execute(
            f"SELECT {number}, deviceId, count(*) FROM {_KERNELS} GROUP BY 1, 2 ORDER BY 3"
        ).fetchall() if columns else []  # fmt: skip
    except sqlite3.Error as error:
        raise _damaged(name, error) from error
    if not rows:
        raise ImportingError(
            f"{name} has no kernels (table {_KERNELS}). Expected an export of a report with CUDA "
            "events. Profile with nsys profile --trace cuda,nvtx."
        )
    devices = {int(process): int(device) for process, device, _ in rows}
    return sorted(devices.items(), key=lambda each: each[::-1])


def _select(
    database: sqlite3.Connection, table: str, process: int, wanted: str, thread: str, name: str
) -> Iterator[tuple[Any, ...]]:
    """The rows of a table that belong to a process, with the text of `name` as the last value."""
    columns = _columns(database, table)
    names = ["start", "end", *wanted.split(", ")]
    if not {*names[:3]} <= columns:
        return iter(())
    chosen = ", ".join(f"t.{each}" if each in columns else "NULL" for each in names)
    if name in columns:
        query = f"SELECT {chosen}, s.value FROM {table} t LEFT JOIN StringIds s ON s.id = t.{name}"
    else:
        query = f"SELECT {chosen}, NULL FROM {table} t"
    if process and thread in columns:
        query += f" WHERE t.{thread} / {_SHIFT} % {_SHIFT} = {int(process)}"
    return database.execute(query)


def _kernels(database: sqlite3.Connection, process: int) -> Iterator[Event]:
    rows = _select(
        database, _KERNELS, process, "deviceId, streamId, correlationId", "globalPid",
        "demangledName",
    )  # fmt: skip
    for start, end, device, stream, correlation, name in rows:
        span = int(start), int(end)
        yield make_event("kernel", name or "unknown kernel", span, device, stream, correlation)


def _graphs(database: sqlite3.Connection, process: int) -> Iterator[Event]:
    """A kernel for each CUDA graph with a known time."""
    for start, end, *place, _ in _graph_rows(database, process):
        if end:
            yield make_event("kernel", "CUDA graph", (int(start), int(end)), *place)


def _graph_rows(database: sqlite3.Connection, process: int) -> Iterator[tuple[Any, ...]]:
    wanted = "deviceId, streamId, correlationId"
    return _select(database, _GRAPHS, process, wanted, "globalPid", "none")


def _note_graphs(database: sqlite3.Connection, process: int) -> list[str]:
    ends = [end for _, end, *_ in _graph_rows(database, process)]
    if not ends:
        return []
    unknown = ends.count(0)
    lost = f"{unknown} of them have no times: idle time includes them. " if unknown else ""
    return [
        f"The trace has {plural(len(ends), 'launch', 'launches')} of CUDA graphs. Each counts as "
        f"one kernel of compute, with the collectives in it. {lost}Profile their kernels with "
        "nsys profile --cuda-graph-trace=node."
    ]


def _copies(database: sqlite3.Connection, process: int) -> Iterator[Event]:
    wanted = "deviceId, streamId, correlationId, copyKind"
    for kind, table in (("Memcpy", "MEMCPY"), ("Memset", "MEMSET")):
        rows = _select(
            database, f"CUPTI_ACTIVITY_KIND_{table}", process, wanted, "globalPid", "none"
        )
        for start, end, device, stream, correlation, copy, _ in rows:
            name, span = f"{kind} {_COPIES.get(copy, '')}".strip(), (int(start), int(end))
            yield make_event(f"gpu_{kind.lower()}", name, span, device, stream, correlation)


def _calls(database: sqlite3.Connection, process: int) -> Iterator[Event]:
    rows = _select(
        database, "CUPTI_ACTIVITY_KIND_RUNTIME", process, "globalTid, correlationId", "globalTid",
        "nameId",
    )  # fmt: skip
    for start, end, thread, correlation, name in rows:
        plain, span = (name or "unknown call").partition("_v")[0], (int(start), int(end))
        yield make_event("cuda_runtime", plain, span, process, thread, correlation)


def _ranges(database: sqlite3.Connection, process: int) -> Iterator[Event]:
    rows = _select(
        database, "NVTX_EVENTS", process, "globalTid, eventType, text", "globalTid", "textId"
    )
    for start, end, thread, kind, text, registered in rows:
        name = text or registered
        if kind not in _RANGES or end is None or not isinstance(name, str):
            continue
        yield make_event(*name_range(name), (int(start), int(end)), process, thread)


def _other_values(database: sqlite3.Connection, device: int | None) -> Event:
    found: Event = {
        NOTES_KEY: [
            "The trace is an export of Nsight Systems. Operators, ranges and steps are its NVTX "
            "ranges; it has no sizes and no process groups of collectives."
        ]
    }
    if "utcEpochNs" in _columns(database, "TARGET_INFO_SESSION_START_TIME"):
        row = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        found["baseTimeNanoseconds"] = row[0] if row else None
    if {"name", "value"} <= _columns(database, "TARGET_INFO_SYSTEM_ENV"):
        host = database.execute(
            "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'"
        ).fetchone()
        found["host_name"] = host[0] if host else ""
    columns = _columns(database, "TARGET_INFO_GPU")
    if {"id", "name"} <= columns:
        memory = "totalMemory" if "totalMemory" in columns else "NULL"
        gpu = database.execute(
            f"SELECT name, {memory} FROM TARGET_INFO_GPU WHERE id = ?", (device,)
        ).fetchone()
        if gpu:
            found["deviceProperties"] = [{"name": gpu[0], "totalGlobalMem": gpu[1]}]
    return found
