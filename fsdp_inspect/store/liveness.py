"""Does this rank still record, or did its process die without a word?"""

import os
import socket
import time
from pathlib import Path

from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.schema import RANK_FILE, RECORDED_TABLES
from fsdp_inspect.trace.run import RankRecord

SILENCE_S = 60.0
"""Silence after which a rank on another host counts as dead; it says something every 15 s."""

_START_TIME_FIELD = 19
"""Of /proc/<pid>/stat, counted after the command's closing parenthesis: proc(5), field 22."""
_START_TOLERANCE_S = 5.0


def is_alive(record: RankRecord, files: RunFiles, folder: str) -> bool:
    """Whether the process that writes this rank still runs, as far as can be told from here.

    Where the rank's process number means something, the process table decides; elsewhere (another
    host, another container) a rank whose files have not changed for a minute counts as dead.

    Args:
        record: The rank, whose status says that it is running.
        files: The run.
        folder: The rank's folder in it.
    """
    is_here = (
        record.pid_scope == pid_scope() if record.pid_scope else record.host == socket.gethostname()
    )
    if is_here:
        return _process_runs(record)
    return time.time_ns() - last_sign_unix_ns(record, files, folder) < SILENCE_S * 1e9


def pid_scope() -> str:
    """Where this process's number names it: the machine's boot and the PID namespace.

    Two containers of one pod share a host name and not their processes; two machines may share a
    host name. Empty where /proc does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def last_sign_unix_ns(record: RankRecord, files: RunFiles, folder: str) -> int:
    """When this rank last wrote anything: wall time in ns."""
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
    # A number given to a newer process: ours has written its record before that one began.
    return started <= record.clock_start.unix_ns / 1e9 + _START_TOLERANCE_S


def _process_start_unix_s(pid: int) -> float | None:
    """When a process began, wall time; None where /proc does not tell. Zombies never began."""
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
