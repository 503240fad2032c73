"""Copy a rank's black box into its folder, from a small process that outlives the rank.

The rank starts `python -I -S black_box_keeper.py DESCRIPTOR PID FILE RUN COPIED` with the memory of
its black box as an open descriptor. Every second this process writes the blocks that changed. It
writes once more after the rank has ended in any way. The rank itself never waits for the disk, and
a rank whose Python is blocked by native code is saved too. The process ends with the rank, or when
a byte arrives on its standard input. It imports the standard library only.

If the rank ended without closing its recording, for example by SIGKILL, it has not reported a
reason. The first such process of a run then becomes `fsdp-inspect diagnose RUN`, which prints on
the rank's stderr. Before that, each process copies its rank's file COPIED to stderr. The file has
the stacks of a crash, which Python would print without the recorder.
"""

import contextlib
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
EXPLAINED_FILE = "explained"
"""See `recording.verdict`."""
_BLOCK = 4096


def keep(descriptor: int, pid: int, target: str) -> bool:
    """Save the black box until the rank ends or asks to stop.

    Args:
        descriptor: The memory of the black box.
        pid: The process of the rank.
        target: The file to write.

    Returns:
        Whether the rank ended without closing its recording.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole job: the rank must end first
    size = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    ends = select.poll()
    ends.register(0, select.POLLIN)
    try:
        process = os.pidfd_open(pid)
        ends.register(process, select.POLLIN)
    except OSError:  # the process has already ended
        _save(_with_end(memory[:]), bytes(size), target)
        return not memory[CLOSED_OFFSET]
    saved = bytes(size)
    watch = Watch(pid)
    is_over = is_asked = False
    while not is_over:
        events = [descriptor for descriptor, _ in ends.poll(INTERVAL_MS)]
        is_over = bool(events)
        # The pipe of a rank that dies closes shortly before the process ends.
        is_asked = 0 in events and os.read(0, 1) != b""
        content = watch.look(memory[:], is_over=is_over)
        if is_over and not is_asked:
            content = _with_end(content)
        if not os.path.exists(target):  # noqa: PTH110 - pathlib takes 10 ms to import
            saved = bytes(size)
        with contextlib.suppress(OSError):  # the disk may work again next time
            _save(content, saved, target)
            saved = content
    return not is_asked and not memory[CLOSED_OFFSET]


def explain(run_folder: str, marker: str) -> None:
    """Become `fsdp-inspect diagnose`, unless another rank of the run has explained its end.

    Args:
        run_folder: The run.
        marker: The file that the first rank creates.
    """
    try:
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        os.dup2(2, 1)
    except OSError:
        return
    command = ("-m", "fsdp_inspect", "diagnose", run_folder, "--brief", "--at-end")
    os.execv(sys.executable, [sys.executable, *command])


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
        state, faults, now = fields[0], int(fields[9]), time.monotonic()
        if ring != self._ring:
            self._ring, self._changed_s, self._faults = ring, now, faults
        still_ns = round((now - self._changed_s) * 1e9)
        since = max(faults - self._faults, 0)
        return WATCHED.pack(time.time_ns(), since, still_ns, self._swapped(), state[:1].encode())

    def _swapped(self) -> int:
        """Bytes of the process that are swapped out; 0 if the system does not report them."""
        with open(f"{self._folder}/status") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("VmSwap:"):
                    return int(line.split()[1]) << 10
        return 0


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
    _, memory_descriptor, rank_pid, box_file, run, copied = sys.argv
    has_vanished = keep(int(memory_descriptor), int(rank_pid), box_file)
    if has_vanished and copied:
        copy_to_stderr(copied)
    if has_vanished and run:
        rank_folder = os.path.dirname(box_file)  # noqa: PTH120
        explain(run, os.path.join(os.path.dirname(rank_folder), EXPLAINED_FILE))  # noqa: PTH118, PTH120
