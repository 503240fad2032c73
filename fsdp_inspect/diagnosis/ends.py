"""Find the end of each rank, and the ends that no other end explains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdp_inspect.trace.black_box import BlackBox
from fsdp_inspect.trace.run import RankRecord, RunStatus
from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump


class EndKind(StrEnum):
    """The kinds of ends of a rank."""

    RUNNING = "running"
    COMPLETE = "complete"
    EXCEPTION = "exception"
    OUT_OF_MEMORY = "out of memory"
    PEER_LOST = "peer lost"
    """An exception because another rank was gone, or did not take part within the time limit."""
    FATAL_SIGNAL = "fatal signal"
    """A crash inside native code, such as a segmentation fault."""
    SIGTERM = "sigterm"
    INTERRUPTED = "interrupted"
    """SIGINT, such as Ctrl-C."""
    VANISHED = "vanished"
    """The rank ended silently: SIGKILL, `os._exit`, or a crash whose stacks are not in the run."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of one rank."""

    rank: int
    kind: EndKind
    detail: str
    """The exception or the signal; empty without one."""
    failed_at: str
    """The user's line of the exception, `file:line`; empty if unknown."""
    unix_ns: int
    """Wall time of the end, or of the last sign of life; 0: unknown."""
    may_have_crashed: bool = False
    """For `VANISHED`: whether a crash could have left no stacks in the run."""

    @property
    def is_crash(self) -> bool:
        """Whether native code failed, or may have: it crashed, or raised an error of its own."""
        if self.kind is EndKind.EXCEPTION:
            return self.detail.startswith(("RuntimeError", "Dist"))
        return self.kind is EndKind.FATAL_SIGNAL or self.may_have_crashed


_TIMED_OUT = re.compile(r"time[ds]? ?out|timing out", re.IGNORECASE)


def has_timed_out(detail: str) -> bool:
    """Whether an error says that a time limit was over."""
    return _TIMED_OUT.search(detail) is not None


def find_ends(
    records: Mapping[int, RankRecord],
    boxes: Mapping[int, BlackBox],
    dumps: Mapping[int, Sequence[StackDump]],
) -> dict[int, RankEnd]:
    """Find the end of each recorded rank."""
    return {
        rank: _find_end(record, boxes.get(rank), dumps.get(rank, ()))
        for rank, record in records.items()
    }


def _find_end(record: RankRecord, box: BlackBox | None, dumps: Sequence[StackDump]) -> RankEnd:
    last = record.flushed_unix_ns
    if box is not None:
        last = box.header.ended_unix_ns or max(last, box.header.sign_unix_ns)
    fatal = next((each.fatal for each in dumps if each.source is DumpSource.CRASH), None)
    at = record.failed_at
    if record.status is RunStatus.RUNNING:
        return RankEnd(record.rank, EndKind.RUNNING, "", at, last)
    if record.status is RunStatus.COMPLETE:
        return RankEnd(record.rank, EndKind.COMPLETE, "", at, last)
    if fatal is not None:
        return RankEnd(record.rank, EndKind.FATAL_SIGNAL, fatal, at, last)
    if record.failure:
        moment = record.failed_unix_ns or last
        return RankEnd(record.rank, _sort(record), record.failure, at, moment)
    if box is not None and box.header.exit_code is not None:
        kind = EndKind.VANISHED if box.header.exit_code else EndKind.COMPLETE
        return RankEnd(record.rank, kind, f"os._exit({box.header.exit_code})", at, last)
    if record.status is RunStatus.CUT_OFF:
        if any(each.source is DumpSource.SIGTERM for each in dumps):
            return RankEnd(record.rank, EndKind.SIGTERM, "", at, last)
        is_caught = record.crash_stacks is True
        return RankEnd(record.rank, EndKind.VANISHED, "", at, last, may_have_crashed=not is_caught)
    return RankEnd(record.rank, EndKind.UNKNOWN, "", at, last)


def _sort(record: RankRecord) -> EndKind:
    if record.ran_out_of_memory:
        return EndKind.OUT_OF_MEMORY
    if (record.failure or "").startswith("KeyboardInterrupt"):
        return EndKind.INTERRUPTED
    return EndKind.PEER_LOST if record.lost_peer else EndKind.EXCEPTION


def first_ends(ends: Mapping[int, RankEnd]) -> list[RankEnd]:
    """The ends that no other rank's end explains; empty if no rank died on its own.

    An exception comes before a lost peer. A vanished rank comes before ranks with SIGTERM, because
    the launcher ends the remaining ranks.
    """
    order = (
        (EndKind.FATAL_SIGNAL, EndKind.OUT_OF_MEMORY, EndKind.EXCEPTION),
        (EndKind.INTERRUPTED, EndKind.VANISHED),
        (EndKind.PEER_LOST,),
    )
    for kinds in order:
        found = sorted(
            (end for end in ends.values() if end.kind in kinds), key=lambda end: end.unix_ns
        )
        if found:
            return found
    return []
