"""Read the state of a rank's process, as seen from outside, after its collectives stopped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fsdp_inspect.diagnosis.activities import Activity, ActivityKind
from fsdp_inspect.trace.black_box import Header
from fsdp_inspect.trace.host_work import LEAST_FAULTS_PER_S
from fsdp_inspect.trace.stack_dumps import StackFrame

_LEAST_SHARE = 0.5
"""The fraction of the standstill that a garbage collection must fill."""


class ProcessState(StrEnum):
    """The state of the main thread."""

    RUNS = "runs"
    SLEEPS = "sleeps"
    WAITS_FOR_DEVICE = "waits for a device"
    STOPPED = "stopped"
    TRACED = "traced"


_STATES = {
    "R": ProcessState.RUNS,
    "S": ProcessState.SLEEPS,
    "D": ProcessState.WAITS_FOR_DEVICE,
    "T": ProcessState.STOPPED,
    "t": ProcessState.TRACED,
}
"""States by the letter in proc(5)."""


@dataclass(frozen=True, slots=True)
class ProcessSigns:
    """Observations of a process that stands still, by the process that keeps its black box."""

    state: ProcessState | None
    """The state; None: another state, or unknown."""
    seconds: float
    """Seconds without a change of its collectives."""
    major_faults: int
    """Pages that the process read from a disk in this time."""
    swap_bytes: int
    """Swapped-out memory of the process."""

    @property
    def is_paging(self) -> bool:
        """Whether the process spends its time on reading its memory from a disk."""
        return self.seconds > 0 and self.major_faults / self.seconds >= LEAST_FAULTS_PER_S


def read_signs(header: Header) -> ProcessSigns | None:
    """Read the observations of a process; None: it was not observed."""
    watched = header.watched
    if not watched.unix_ns:
        return None
    return ProcessSigns(
        _STATES.get(watched.state), watched.still_ns / 1e9, watched.major_faults, watched.swap_bytes
    )


def find_collection(header: Header, idle_s: float | None) -> Activity | None:
    """The garbage collection that fills most of the time in which a rank issued no collective.

    Args:
        header: The header of the rank's black box.
        idle_s: Seconds without a new collective.
    """
    collection, seen_ns = header.collection, max(header.watched.unix_ns, header.sign_unix_ns)
    if collection is None or idle_s is None:
        return None
    if (seen_ns - collection.began_unix_ns) / 1e9 < idle_s * _LEAST_SHARE:
        return None
    file, _, line = collection.place.rpartition(":")
    frame = StackFrame(file, int(line), "") if file and line.isdecimal() else None
    return Activity(ActivityKind.GARBAGE_COLLECTION, frame, "")
