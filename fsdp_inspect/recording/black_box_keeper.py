"""Copy a rank's black box into its folder, from a small process that outlives the rank.

The rank starts `python -I -S black_box_keeper.py DESCRIPTOR PID JOB FILE RUN COPIED` with the
memory of its black box as an open descriptor. Every second this process writes the blocks that
changed. It writes once more after the rank has ended in any way. The rank itself never waits for
the disk, and a rank whose Python is blocked by native code is saved too. The process ends with the
rank, or when `STOP` arrives on its standard input. It imports the standard library only.

If the rank failed (`FAILED` on its standard input) or ended without closing its recording, for
example by SIGKILL, the reason is explained after the end of the rank, which waits for nothing. One
such process of a run starts `fsdp-inspect diagnose RUN`, which prints on the rank's stderr, and
ends it soon after the process JOB, the launcher of the ranks. Before that, each process copies its
rank's file COPIED to stderr. The file has the stacks of a crash, which Python would print without
the recorder.

[Note: One explanation]
The process that explains holds a lock on `LOCK_FILE`, and creates `EXPLAINED_FILE` after it has
printed. If it is killed before that, its lock is released, and the process of the next rank
explains. A watchdog that explains a hang does the same.
"""

import contextlib
import fcntl
import mmap
import os
import select
import signal
import struct
import sys
import time

INTERVAL_MS = 1000
ENDED_OFFSET = 256
"""See `trace.black_box`."""
WATCHED_OFFSET = 264
"""See `trace.black_box`."""
WATCHED = struct.Struct("<qqqqc7x")
"""See `trace.black_box`."""
RING_OFFSET = 512
"""See `trace.black_box`."""
CLOSED_OFFSET = 97
"""See `trace.black_box`."""
LOCK_FILE = "explaining"
"""A file next to the folders of the ranks, locked by the process that explains."""
EXPLAINED_FILE = "explained"
"""A file next to it: the run's end, or a hang, is explained on stderr."""
STOP, FAILED = b"q", b"f"
"""Messages of the rank: its recording is closed; its training failed, and it will end."""
_NICE = 5
_CAUGHT_S = 5.0
"""The time for which the explanation of a failure waits for the end of the rank."""
_TURN_S = 0.1
"""The interval in which a process looks whether it is its turn to explain."""
_AFTER_JOB_S = 1.4
"""The time for which it looks, and the explanation runs, after the end of the job."""
_HINT = "The training failed. To see which rank failed first, and why: fsdp-inspect diagnose"
_BLOCK = 4096
_DEAD_STATES = ("Z", "X", "x")
_DYING_FLAGS = 0x4 | 0x200 | 0x400
"""Flags of a process that exits, dumps its core, or was killed by a signal (`flags` in proc(5))."""
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
"""The bit of SIGKILL in the masks of pending signals."""


def keep(descriptor: int, pid: int, target: str) -> bool:
    """Save the black box until the rank ends or asks to stop.

    Args:
        descriptor: The memory of the black box.
        pid: The process of the rank.
        target: The file to write.

    Returns:
        Whether the end of the rank needs an explanation: it failed, or it did not close its
        recording.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole job: the rank must end first
    size = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    ends = select.poll()
    ends.register(0, select.POLLIN)
    process = open_process(pid)
    if process < 0:  # it has already ended
        _save(_with_end(memory[:]), bytes(size), target)
        return not memory[CLOSED_OFFSET]
    ends.register(process, select.POLLIN)
    saved = bytes(size)
    watch = Watch(pid)
    is_over = is_asked = has_failed = False
    while not (is_over or has_failed):
        events = [descriptor for descriptor, _ in ends.poll(INTERVAL_MS)]
        # The pipe of a rank that dies closes shortly before the process ends.
        message = os.read(0, 1) if 0 in events else b""
        is_asked, has_failed, is_over = message == STOP, message == FAILED, bool(events)
        content = watch.look(memory[:], is_over=is_over)
        if is_over and not (is_asked or has_failed):
            content = _with_end(content)
        if not os.path.exists(target):  # noqa: PTH110 - pathlib takes 10 ms to import
            saved = bytes(size)
        with contextlib.suppress(OSError):  # the disk may work again next time
            _save(content, saved, target)
            saved = content
    if has_failed:
        _await_end(process, _CAUGHT_S)
    return has_failed or not (is_asked or memory[CLOSED_OFFSET])


def give_way() -> None:
    """Leave the processors to the ranks that end, and to their launcher.

    Linux may group processes by session (sched(7), autogroup): a priority then counts only within
    the session, and the session has one of its own.
    """
    os.nice(_NICE)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:  # noqa: PTH123
        file.write(str(_NICE))


def open_process(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1: it has ended."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _await_end(process: int, timeout_s: float) -> None:
    """Wait for the end of a process; it lives on if the script has caught its error."""
    select.select([process], [], [], timeout_s)


def explain(run_folder: str, folder: str, job: int) -> None:
    """Run `fsdp-inspect diagnose` when no other process explains the end of the run.

    Args:
        run_folder: The run.
        folder: The folder of the attempt, with the folders of the ranks.
        job: A descriptor of the launcher's process; -1: it has ended.
    """
    if not _wait_for_turn(folder, job):
        return
    attempt = str(int(folder.rpartition("-")[2]))
    marker = os.path.join(folder, EXPLAINED_FILE)  # noqa: PTH118
    command = (sys.executable, "-m", "fsdp_inspect", "diagnose", run_folder, "--brief")
    options = ("--attempt", attempt, "--at-end", marker, "--job", str(job))
    run_with_job([*command, *options], job, f"{_HINT} {run_folder}")


def run_with_job(command: list[str], job: int, last_words: str) -> None:
    """Run a command that prints on stderr, and end it soon after the job.

    Args:
        command: The program and its arguments.
        job: A descriptor of the job's process; -1: the job has ended.
        last_words: Printed if the command is ended.
    """
    if job >= 0:
        os.set_inheritable(job, True)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
            give_way()
            os.execv(command[0], command)
        os._exit(1)
    child = os.pidfd_open(pid)
    ended = select.select([child, *([job] if job >= 0 else ())], [], [])[0]
    if child not in ended and not select.select([child], [], [], _AFTER_JOB_S)[0]:
        os.kill(pid, signal.SIGKILL)
        os.write(2, f"fsdp_inspect: {last_words}\n".encode())
    os.waitpid(pid, 0)


def _wait_for_turn(folder: str, job: int) -> bool:
    """Wait for the lock; returns whether the end still has to be explained."""
    try:
        lock = os.open(os.path.join(folder, LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o644)  # noqa: PTH118
    except OSError:
        return False
    ended_s = None
    while True:
        if os.path.exists(os.path.join(folder, EXPLAINED_FILE)):  # noqa: PTH110, PTH118
            return False
        if take_lock(lock):
            return not os.path.exists(os.path.join(folder, EXPLAINED_FILE))  # noqa: PTH110, PTH118
        if job < 0 or select.select([job], [], [], _TURN_S)[0]:
            ended_s = ended_s or time.monotonic()
            if time.monotonic() - ended_s > _AFTER_JOB_S:
                return False
            time.sleep(_TURN_S)


def take_lock(lock: int) -> bool:
    """Lock a file unless another process has; True also if the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def copy_to_stderr(path: str) -> None:
    """Print a file, if it exists."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
        os.write(2, file.read())


class Watch:
    """Looks at the process of the rank from outside: it may be stopped, or hold Python's lock."""

    def __init__(self, pid: int) -> None:
        """`pid`: the process."""
        self._folder = f"/proc/{pid}"
        self._ring = b""
        self._changed_s = time.monotonic()
        self._faults = 0
        """The major page faults of the process when its collectives last changed."""
        self._last = bytes(WATCHED.size)

    def look(self, content: bytes, *, is_over: bool) -> bytes:
        """The black box with the current state of the process; at the end, with its last state."""
        if not is_over:
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._last = self._read(content[RING_OFFSET:])
        end = WATCHED_OFFSET + WATCHED.size
        return content[:WATCHED_OFFSET] + self._last + content[end:]

    def _read(self, ring: bytes) -> bytes:
        """The state of the process according to proc(5)."""
        with open(f"{self._folder}/stat") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
        if fields[0] in _DEAD_STATES or int(fields[6]) & _DYING_FLAGS:
            return self._last  # its state says nothing about its work
        state, faults, now = fields[0], int(fields[9]), time.monotonic()
        if ring != self._ring:
            self._ring, self._changed_s, self._faults = ring, now, faults
        still_ns = round((now - self._changed_s) * 1e9)
        since = max(faults - self._faults, 0)
        with open(f"{self._folder}/status") as file:  # noqa: PTH123
            status = dict(line.split(":", 1) for line in file)
        killed = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
        if killed & _SIGKILL_BIT:
            return self._last
        swapped = int(status.get("VmSwap", "0").split()[0]) << 10
        return WATCHED.pack(time.time_ns(), since, still_ns, swapped, state[:1].encode())


def _with_end(content: bytes) -> bytes:
    """The black box with the current time as the end of the rank."""
    end = time.time_ns().to_bytes(8, "little")
    return content[:ENDED_OFFSET] + end + content[ENDED_OFFSET + len(end) :]


def _save(content: bytes, saved: bytes, target: str) -> None:
    """Write the blocks that differ from the saved ones."""
    if content == saved:
        return
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for start in range(0, len(content), _BLOCK):
            block = content[start : start + _BLOCK]
            if block != saved[start : start + _BLOCK]:
                os.pwrite(descriptor, block, start)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    if sys.argv[1] == "with-job":
        run_with_job(sys.argv[4:], open_process(int(sys.argv[2])), sys.argv[3])
        sys.exit()
    _, memory_descriptor, rank_pid, job_pid, box_file, run, copied = sys.argv
    launcher = open_process(int(job_pid)) if run else -1
    needs_explanation = keep(int(memory_descriptor), int(rank_pid), box_file)
    if needs_explanation and copied:
        copy_to_stderr(copied)
    if needs_explanation and run:
        explain(run, os.path.dirname(os.path.dirname(box_file)), launcher)  # noqa: PTH120
