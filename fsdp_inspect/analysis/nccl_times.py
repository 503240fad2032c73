"""Join logs of NCCL Inspector to a run: NCCL's own times by unit and by communicator.

A process of the logs is a rank of the run by its host and pid; in an import, by its rank in the
communicator of all ranks. A log numbers the collectives of one kind on one communicator, also those
before the recording. So the recorded sequence lies at some offset in the numbers. An offset fits if
all sizes agree that both sides know, and no collective is logged before it ends. The first offset
is certain if one was logged as soon as it ended. If several remain, a collective counts only if all
of them give it the same unit: steps repeat, so offsets by whole steps agree.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect import columns
from fsdp_inspect.analysis.shared_collectives import Matching
from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.columns import TableSpec, metric_column, number_column, text_column
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_ranks, format_unit, plural
from fsdp_inspect.importing.nccl_inspector import CollectiveLog
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventKind
from fsdp_inspect.trace.run import UNPLACED_CLOCK, RankRecord, RunSource
from fsdp_inspect.trace.tables import EventTable

_PROMPT_NS = 5_000_000
"""The wall times of a log and a run differ by at most this, and a prompt log is no later."""
_OUTSIDE, _UNCLEAR = -2, -3
"""Not a unit: no recorded collective fits, or those of several units."""
_UNMATCHED = {
    _UNCLEAR: "cannot tell: the sizes fit several units, and the times do not decide",
    _OUTSIDE: "outside the recorded steps",
}

_NO_STEPS = (
    "The log of some collectives was written too late to tell which step is which. They have no "
    "recorded duration. Set NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=500."
)


@dataclass(frozen=True, slots=True)
class NcclCost:
    """Collectives of one kind: the matched ones of a unit, or all of a communicator."""

    fqn: str | None
    """The unit, empty for the root; None: outside all units, or a communicator."""
    communicator: str
    """Empty: a unit."""
    kind: str
    group_size: int
    count: int
    matched: int
    bytes: int
    """The largest full message. The times and rates are medians."""
    nccl_ns: int
    recorded_ns: int | None
    """Of the matched collectives; None: it is not certain which step is which."""
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    channels: int | None
    """The most of one collective; None: the logs are not verbose."""
    timing: str
    reason: str
    """Why collectives of a communicator are not matched."""


_COLUMNS = (
    text_column("collective", "kind of collective", lambda row: row.kind.replace("_", "-")),
    number_column("group_size", "ranks of the communicator", label="ranks"),
    number_column("count", "logged collectives", label="n"),
    columns.value_column("bytes", MetricUnit.BYTES, "largest full message", label="message"),
    columns.value_column("nccl_ns", MetricUnit.NS, "median time of NCCL's kernel", label="NCCL"),
    columns.value_column(
        "recorded_ns", MetricUnit.NS, "median duration of the same in the run", label="recorded"
    ),
    metric_column("algorithm_bytes_per_s", metric="bus_bytes_per_s", label="algorithm"),
    metric_column("bus_bytes_per_s", label="bus"),
    number_column("channels", "most channels of one collective (verbose logs)"),
    text_column("timing", "clock of NCCL's times: kernel_gpu, or one of the host"),
)


@dataclass(frozen=True, slots=True)
class NcclTimes(TableResult):
    """NCCL's own times of a run's collectives."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "NCCL's own times by unit (medians; the largest message)",
        (
            columns.unit_column(
                "FSDP unit", lambda row: None if row.fqn is None else format_unit(row.fqn)
            ),
            *_COLUMNS,
        ),
    )
    COMMUNICATORS: ClassVar[TableSpec] = TableSpec(
        "Communicators (medians; the largest message)",
        (
            text_column("communicator", "hash and name of the communicator"),
            *_COLUMNS[:3],
            number_column("matched", "collectives whose unit in the run is certain"),
            *_COLUMNS[3:],
            text_column("reason", "why the others are not matched", label="not matched"),
        ),
    )

    ranks: tuple[int, ...]
    """The ranks whose logs were read."""
    units: tuple[NcclCost, ...]
    communicators: tuple[NcclCost, ...]
    notes: tuple[str, ...]

    def rows(self) -> Sequence[NcclCost]:
        """The matched collectives by unit."""
        return self.units

    @property
    def sentence(self) -> str:
        """The number of matched collectives."""
        matched = sum(row.matched for row in self.communicators)
        total = plural(sum(row.count for row in self.communicators), "logged collective")
        return f"{matched:,} of {total} of {format_ranks(self.ranks)} are matched to the run."


def measure_nccl(
    run: RunSource,
    logs: Sequence[CollectiveLog],
    *,
    rank: int | None = None,
    notes: Sequence[str] = (),
) -> NcclTimes:
    """Join the logs of some ranks to a run; `rank`: only this one. `notes` come first.

    Raises:
        IncompleteRunError: The run has no data of the rank.
        MissingDataError: No log belongs to a rank of the run.
    """
    timed_rank(run, rank)
    records = {each.rank: each for each in run.ranks if rank in (None, each.rank)}
    world = run.manifest.world_size
    in_world = {log.process: log.rank for log in logs if log.num_ranks == world}
    in_run = {(each.host, each.pid): each.rank for each in records.values() if each.pid}
    by_rank: dict[int, list[CollectiveLog]] = defaultdict(list)
    for log in logs:
        number = (in_run or in_world).get(log.process, -1)
        if number in records:
            by_rank[number].append(log)
    if not by_rank:
        known = sorted({f"{host}, pid {pid}" for host, pid in (log.process for log in logs)})
        raise MissingDataError(
            f"No log belongs to a rank of run {run.manifest.run_id!r}. The logs are those of "
            f"{'; '.join(known[:3]) or 'no collective'}. Choose the logs of the same training."
        )
    missing = sorted(records.keys() - by_rank.keys())
    found = [each for number, own in by_rank.items() for each in _join(run, records[number], own)]
    names = {unit.index: unit.fqn for unit in run.manifest.units}
    by_unit: dict[tuple[int, int, int], list[_Joined]] = defaultdict(list)
    communicators: dict[tuple[str, int, int], list[_Joined]] = defaultdict(list)
    for each in found:
        kind, size = each.log.kind, each.log.num_ranks
        communicators[each.log.communicator, kind, size].append(each)
        for unit in np.unique(each.unit[each.unit >= NO_UNIT]).tolist():
            by_unit[unit, kind, size].append(each.of(unit))
    units = [_cost(own, names.get(key[0]), "") for key, own in sorted(by_unit.items())]
    more = [f"No log of {format_ranks(missing)}."] if missing else []
    more += [_NO_STEPS] if any(row.recorded_ns is None for row in units) else []
    return NcclTimes(
        tuple(sorted(by_rank)),
        tuple(units),
        tuple(_cost(own, None, key[0]) for key, own in sorted(communicators.items())),
        (*notes, *more),
    )


@dataclass(slots=True)
class _Joined:
    """A log, with the unit and the recorded duration (-1: not certain) of each collective."""

    log: CollectiveLog
    unit: NDArray[np.int64]
    recorded_ns: NDArray[np.int64]
    reason: str = ""

    def of(self, unit: int) -> "_Joined":
        own = self.unit == unit
        log = replace(self.log, rows=self.log.rows[own])
        return _Joined(log, self.unit[own], self.recorded_ns[own])


def _join(run: RunSource, record: RankRecord, logs: Sequence[CollectiveLog]) -> Iterator[_Joined]:
    events = run.events(record.rank, kinds=[int(kind) for kind in COLLECTIVES])
    matching = Matching(run.manifest.process_groups, run.manifest.world_size)
    fits = []
    for group in np.unique(events.group).tolist():
        members = matching.members(group, record.rank)
        for place, log in enumerate(logs):
            if len(members) == log.num_ranks and members.index(record.rank) == log.rank:
                parts = [*_fit(events.where(events.group == group), log, record)]
                fits += [(place, (group, log.kind), parts)] if parts else []
    claims = Counter(claim for _, claim, _ in fits)
    for place, log in enumerate(logs):
        joined = _Joined(log, np.full(len(log.rows), _OUTSIDE), np.full(len(log.rows), -1))
        own = [(claim, parts) for at, claim, parts in fits if at == place]
        if not own:
            joined.reason = "no process group with as many ranks has these sizes at these times"
        elif len(own) > 1 or claims[own[0][0]] > 1:
            joined.reason = "cannot tell: several communicators or process groups fit"
        else:
            _label(joined, own[0][1])
        yield joined


_Fit = tuple[EventTable, list[int]]
"""Consecutive collectives of the run, and the offsets at which they fit a log."""


def _fit(events: EventTable, log: CollectiveLog, record: RankRecord) -> Iterator[_Fit]:
    """The parts of a process group's collectives that fit a log."""
    events = events.where(np.argsort(events.sequence, kind="stable"))
    parts = np.cumsum(np.diff(events.sequence, prepend=events.sequence[:1]) > 1)
    kinds = [log.kind, EventKind.BARRIER]  # a barrier of NCCL is an all-reduce
    is_own = np.isin(events.kind, kinds if log.kind == EventKind.ALL_REDUCE else kinds[:1])
    sizes, times = (_numbered(log, log.rows[name]) for name in ("bytes", "time_ns"))
    for part in np.unique(parts[is_own]).tolist():
        own = events.where(is_own & (parts == part))
        offsets = _offsets(sizes, np.where(own.kind == log.kind, own.bytes, -1))
        if _is_placed(record):
            offsets = _in_time(offsets, own, times, record)
        if offsets:
            yield own, offsets


def _is_placed(record: RankRecord) -> bool:
    """Whether event times have a wall time: the wall clock was not set during the recording."""
    shifts = [
        pair.unix_ns - pair.monotonic_ns
        for pair in (record.clock_start, record.clock_end or record.clock_start)
    ]
    return record.clock != UNPLACED_CLOCK and abs(shifts[1] - shifts[0]) <= _PROMPT_NS


def _numbered(log: CollectiveLog, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The value of each number from the first logged one to the last one; -1: not logged."""
    number = log.rows["number"] - log.rows["number"][0]
    found = np.full(int(number[-1]) + 1, -1)
    found[number] = values
    return found


def _offsets(logged: NDArray[np.int64], recorded: NDArray[np.int64]) -> list[int]:
    """The offsets of the second sequence in the first at which all known values (>= 0) agree.

    Three correlations sum (a - b)^2 over the pairs of each offset.
    """
    length = 1 << int(len(logged) + len(recorded)).bit_length()
    values = np.unique(np.concatenate([logged, recorded]))

    def transform(each: NDArray[np.int64]) -> list[NDArray[Any]]:
        known, code = each >= 0, np.searchsorted(values, each)
        return [np.fft.rfft(known * code**power, length) for power in range(3)]

    a, b = transform(logged), [each.conj() for each in transform(recorded)]
    pairs = np.fft.irfft(a[0] * b[0], length)
    apart = np.fft.irfft(a[2] * b[0] - 2 * a[1] * b[1] + a[0] * b[2], length)
    found = np.flatnonzero((apart < 0.5) & (pairs > 0.5))
    return sorted(np.where(found < len(logged), found, found - length).tolist())


def _overlap(offset: int, logged: NDArray[Any], count: int) -> tuple[NDArray[Any], slice]:
    """The parts of the numbers and of the recorded sequence that overlap."""
    first, last = max(offset, 0), min(offset + count, len(logged))
    return logged[first:last], slice(first - offset, last - offset)


def _in_time(
    offsets: list[int], events: EventTable, times: NDArray[np.int64], record: RankRecord
) -> list[int]:
    """The offsets at which no collective is logged before it ends; only the certain one, if any."""
    slack = _PROMPT_NS + record.clock_uncertainty_ns
    ends = events.end_ns - record.clock_start.monotonic_ns + record.clock_start.unix_ns
    possible = []
    for offset in offsets:
        logged, recorded = _overlap(offset, times, len(events))
        delays = (logged - ends[recorded])[logged >= 0]
        if delays.min() >= -slack:
            possible.append((offset, int(delays.min()), len(delays)))
    if possible:
        (_, delay, count), *later = possible
        is_large = 2 * count >= min(len(events), int((times >= 0).sum()))
        if is_large and delay <= slack and all(each[1] - delay > 2 * slack for each in later):
            del possible[1:]
    return [offset for offset, *_ in possible]


def _label(joined: _Joined, fits: Sequence[_Fit]) -> None:
    """Set the unit on which all offsets of all parts agree, and the duration if there is one."""
    unit = joined.unit
    places = _numbered(joined.log, np.arange(len(unit)))
    for events, offsets in fits:
        for offset in offsets:
            logged, recorded = _overlap(offset, places, len(events))
            own = logged[logged >= 0]
            taken = events.where(np.arange(len(events))[recorded][logged >= 0])
            is_new = (unit[own] == _OUTSIDE) | (unit[own] == taken.unit)
            unit[own] = np.where(is_new, taken.unit, _UNCLEAR)
            if len(offsets) == 1:
                joined.recorded_ns[own] = np.where(is_new, taken.end_ns - taken.start_ns, -1)


def _cost(own: Sequence[_Joined], fqn: str | None, communicator: str) -> NcclCost:
    log, reasons = own[0].log, {each.reason for each in own} - {""}
    for code, why in _UNMATCHED.items():
        count = sum(int((each.unit == code).sum()) for each in own if not each.reason)
        reasons |= {f"{count:,} {why}"} if count else set()
    rows = np.concatenate([each.log.rows for each in own])
    recorded_ns = np.concatenate([each.recorded_ns for each in own])
    recorded_ns = recorded_ns[recorded_ns >= 0]
    return NcclCost(
        fqn=fqn,
        communicator=communicator,
        kind=log.kind.label,
        group_size=log.num_ranks,
        count=len(rows),
        matched=sum(int((each.unit >= NO_UNIT).sum()) for each in own),
        bytes=int(rows["bytes"].max()),
        nccl_ns=round(np.median(rows["nccl_ns"])),
        recorded_ns=round(np.median(recorded_ns)) if len(recorded_ns) else None,
        algorithm_bytes_per_s=float(np.median(rows["algorithm"])),
        bus_bytes_per_s=float(np.median(rows["bus"])),
        channels=int(rows["channels"].max()) or None,
        timing=", ".join(np.unique(rows["timing"]).tolist()),
        reason="; ".join(sorted(reasons)),
    )
