"""Decide whether a rank still records or its process has exited silently."""

import os
import socket
import time
from pathlib import Path

from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.schema import RANK_FILE, RECORDED_TABLES
from fsdp_inspect.trace.run import RankRecord

SILENCE_S = 60.0
"""Time without writes after which a rank on another host counts as crashed. A live rank writes
every 15 s."""

_START_TIME_FIELD = 19
"""Index in /proc/<pid>/stat, after the command's closing parenthesis: proc(5), field 22."""
_START_TOLERANCE_S = 5.0


def is_alive(record: RankRecord, files: RunFiles, folder: str) -> bool:
    """Whether the process that records this rank still runs, as far as this process can see.

    In the rank's PID namespace, the process table decides. From another host or container, a rank
    counts as crashed when its files have not changed for a minute, or at a URL for two minutes.

    Args:
        record: The record of a rank with the status `running`.
        files: The run.
        folder: The rank's folder in it.
    """
    is_here = (
        record.pid_scope == pid_scope() if record.pid_scope else record.host == socket.gethostname()
    )
    if is_here:
        return _process_runs(record)
    silence_s = SILENCE_S + files.delay_s
    return time.time_ns() - last_sign_unix_ns(record, files, folder) < silence_s * 1e9


def pid_scope() -> str:
    """The scope in which this process's id is unique: the machine's boot and PID namespace.

    A host name is not enough: containers of one pod share it without sharing processes, and two
    machines may have the same one. Empty without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def last_sign_unix_ns(record: RankRecord, files: RunFiles, folder: str) -> int:
    """Time of the last write of this rank: wall time, ns."""
    names = [RANK_FILE, *(file.live_name for file in RECORDED_TABLES)]
    times = (files.modified_unix_ns(f"{folder}/{name}") for name in names)
    return max(record.flushed_unix_ns, *(moment or 0 for moment in times))


def _process_runs(record: RankRecord) -> bool:
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started = _process_start_unix_s(record.pid)
    if started is None:
        return True
    # If the id belongs to a newer process now, that process started after our record was written.
    return started <= record.clock_start.unix_ns / 1e9 + _START_TOLERANCE_S


def _process_start_unix_s(pid: int) -> float | None:
    """Start time of a process, wall time; None without /proc. A zombie has the start `inf`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime")
        )
    except (OSError, StopIteration, ValueError):
        return None
    if fields[0] in "ZX":
        return float("inf")
    return boot + int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
