"""List the events of a run in their order: a fault does not disappear because the run goes on.

An event only states a fact. The diagnosis decides which one is the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from fsdp_inspect.diagnosis.ends import EndKind, RankEnd
from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.black_box import BlackBox
from fsdp_inspect.trace.codes import UNKNOWN_STEP, EventKind
from fsdp_inspect.trace.run import RankRecord, RunSource, TimeSpan

_NO_END = (EndKind.RUNNING, EndKind.UNKNOWN)


class RunEventKind(StrEnum):
    """The kinds of events."""

    DESYNC = "desync"
    NOT_FINITE = "not finite"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"
    END = "end"


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event of a run."""

    kind: RunEventKind
    step: int | None
    """None: unknown."""
    unix_ns: int
    """Wall time; 0: unknown."""
    ranks: tuple[int, ...]
    """The ranks; empty: all of them, or unknown."""
    seconds: float | None = None
    """HANG: the time in which nothing moved."""
    has_ended: bool = False
    """HANG: whether the training moved on."""
    end: RankEnd | None = None
    """END: the end of the first of the ranks."""


def in_order(events: Iterable[RunEvent]) -> tuple[RunEvent, ...]:
    """The events by step. The ends of ranks come last, in the order of their times."""

    def order(event: RunEvent) -> tuple[bool, int, int]:
        if event.kind is RunEventKind.END:
            return True, event.unix_ns, 0
        step = -1 if event.step is None else event.step
        return False, step, list(RunEventKind).index(event.kind)

    return tuple(sorted(events, key=order))


def list_ends(ends: Mapping[int, RankEnd], steps: Mapping[int, int | None]) -> Iterator[RunEvent]:
    """The ends of the ranks; ranks that ended equally in the same step are one event.

    Args:
        ends: The ends by rank.
        steps: The last known step of each rank.
    """
    groups: dict[tuple[EndKind, str, int | None], list[RankEnd]] = {}
    for rank, end in ends.items():
        if end.kind not in _NO_END:
            groups.setdefault((end.kind, end.detail, steps.get(rank)), []).append(end)
    for (_, _, step), each in groups.items():
        first = min(each, key=lambda end: end.unix_ns)
        ranks = tuple(sorted(end.rank for end in each))
        yield RunEvent(RunEventKind.END, step, first.unix_ns, ranks, end=first)


def list_hangs(
    run: RunSource, records: Mapping[int, RankRecord], boxes: Mapping[int, BlackBox]
) -> Iterator[RunEvent]:
    """The standstills that watchdogs saw: the longest of those that ended, and the last one."""
    ended = [
        (record, span)
        for record in records.values()
        if record.life is not None
        for span in record.life.standstills
    ]
    if ended:
        record, span = max(ended, key=lambda pair: pair[1].end_ns - pair[1].start_ns)
        clock = record.clock_start
        step = _step_of(run, record.rank, span)
        yield RunEvent(
            RunEventKind.HANG,
            _step_at(boxes.get(record.rank), span.start_ns) if step is None else step,
            span.start_ns - clock.monotonic_ns + clock.unix_ns,
            (),
            seconds=(span.end_ns - span.start_ns) / 1e9,
            has_ended=True,
        )
    if run.manifest.source == "imported":  # a dump does not say when something moved last
        return
    stuck = [box.header for box in boxes.values() if box.header.hang_seen_ns]
    if stuck:
        header = max(stuck, key=lambda each: each.sign_ns - each.changed_ns)
        seconds = (header.sign_ns - header.changed_ns) / 1e9
        step = None if header.step == UNKNOWN_STEP else header.step
        yield RunEvent(RunEventKind.HANG, step, header.hang_seen_unix_ns, (), seconds=seconds)


def _step_of(run: RunSource, rank: int, span: TimeSpan) -> int | None:
    """The first step that ended after a standstill began; None: it is not stored."""
    try:
        steps = run.events(rank, kinds=[EventKind.STEP])
    except StoreError:
        return None
    later = steps.step[steps.end_ns > span.start_ns]
    return int(later.min()) if len(later) else None


def _step_at(box: BlackBox | None, clock_ns: int) -> int | None:
    """The step of the last collective before a moment; None if it is no longer stored."""
    if box is None:
        return None
    rows = box.entries[box.entries["issued_ns"] <= clock_ns]
    return int(rows["step"][-1]) if len(rows) else None


def list_failed_allocations(run: RunSource) -> Iterator[RunEvent]:
    """The allocations that failed, also if the script caught the error."""
    for record in run.ranks:
        found = run.out_of_memory(record.rank)
        if found is not None:
            yield RunEvent(RunEventKind.OUT_OF_MEMORY, found.step, 0, (record.rank,))
