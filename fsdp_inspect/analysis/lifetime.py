"""Split the wall time of a run into phases that add up to it, and measure its goodput.

[Note: Phases of a run] One rank is followed over all attempts of the run, in wall time. By default,
another rank is followed in an attempt of which the lowest rank has no data, or not the last rows,
because it was killed. Each moment
belongs to the first of these phases that applies: checkpoint, evaluation, compile, idle, first
step, training, lost, load, shard, start, build, end. A moment of an attempt in none of them is
`other`, and a moment between two attempts is `restart`. Attempts that overlap (clocks of two hosts)
are cut at the end of the earlier one. So the phases are disjoint and cover the wall time for any
recorded times.

[Note: Steps that count] A completed step counts unless a restart lost it. The steps of an attempt
that another attempt follows survive up to the start of the last checkpoint that the attempt saved
completely, and only if the next attempt loaded a checkpoint, or its first sampled parameters are
others than those of the first attempt. The first step of an attempt sets up and compiles, so its
time is no goodput.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.plain_steps import find_other_plain_steps
from fsdp_inspect.analysis.step_selection import find_record, sum_per_step
from fsdp_inspect.columns import TableSpec, metric_column, text_column, value_column
from fsdp_inspect.errors import MissingDataError, StoreError
from fsdp_inspect.formatting import find_missing_numbers, format_attempts, format_ns, plural
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import (
    EXPOSED_PART_CODES,
    EventFlag,
    EventKind,
    StepPart,
)
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import (
    ProcessLife,
    RankRecord,
    RunSource,
    RunStatus,
    TimeSpan,
    completed_steps,
)
from fsdp_inspect.trace.tables import MISSING_INT, EventTable, if_known, rows_of


class LifePhase(StrEnum):
    """A phase of a run. See [Note: Phases of a run]."""

    START = "start"
    """The time from the start of the process until torch and the recorder are imported."""
    BUILD = "build"
    """The time from the imports to the first step, without sharding and loading: process groups,
    model, optimizer, data."""
    LOAD = "load"
    """Calls of torch that load a checkpoint, before the first step."""
    SHARD = "shard"
    """The time from the start of the first `fully_shard` call to the end of the last one."""
    FIRST_STEP = "first step"
    """The first step of an attempt, with the set-up of communicators."""
    COMPILE = "compile"
    """Compilation by torch.compile, in any step."""
    IDLE = "idle"
    """The time without progress beyond the watchdog's limit: no collective began or ended, and no
    step ended."""
    TRAINING = "training"
    """The other steps that count."""
    LOST = "lost"
    """Steps lost at a restart, and the time after the last step of an attempt that failed or
    was cut off."""
    EVALUATION = "evaluation"
    """The time between steps without a checkpoint."""
    CHECKPOINT = "checkpoint"
    """The time in which the training waits for a checkpoint to be saved."""
    RESTART = "restart"
    """The time between two attempts."""
    END = "end"
    """The time after the last step of an attempt that ended normally."""
    OTHER = "other"
    """Unknown time, for example the current step of a live run."""


_IN_ORDER = (
    LifePhase.CHECKPOINT,
    LifePhase.EVALUATION,
    LifePhase.COMPILE,
    LifePhase.IDLE,
    LifePhase.FIRST_STEP,
    LifePhase.TRAINING,
    LifePhase.LOST,
    LifePhase.LOAD,
    LifePhase.SHARD,
    LifePhase.START,
    LifePhase.BUILD,
    LifePhase.END,
)
"""Phases in order of priority. A moment has the first phase that applies."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a run, or one part of the training."""

    phase: str
    duration_ns: int
    wall_ratio: float
    process_peak_bytes: int | None = None
    """Highest known resident memory of the process in this phase; None: unknown."""
    host_peak_bytes: int | None = None
    """Highest known used memory of the host in this phase; None: unknown."""


@dataclass(frozen=True, slots=True)
class Lifetime(TableResult):
    """The wall time of a run by phase, for one rank."""

    run_id: str
    rank: int
    wall_ns: int
    goodput_ratio: float
    """Time of the phase training / wall time; 0.0 for a run without wall time."""
    phases: tuple[PhaseTime, ...]
    """The phases with time, in the order of `LifePhase`; they add up to `wall_ns` exactly."""
    training_parts: tuple[PhaseTime, ...]
    """Exposed communication, data and host-bound time of the phase training. Steps with a
    compilation or a standstill are left out. Plain steps count like the detailed ones."""
    background_checkpoint_ns: int
    """Time in which a checkpoint was written next to other phases."""
    num_attempts: int
    num_steps: int
    """Completed steps of all attempts."""
    num_lost_steps: int
    """Number of steps that a restart lost."""
    is_whole: bool
    """Whether all attempts, steps and checkpoints are known; else the numbers are of the known."""
    notes: tuple[str, ...]

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Phases of the run",
        (
            text_column("phase", "The phase; the phases add up to the wall time."),
            value_column("duration_ns", MetricUnit.NS, "Time in this phase.", label="time"),
            metric_column("wall_ratio", label="share"),
            value_column(
                "process_peak_bytes",
                MetricUnit.BYTES,
                "Highest known resident memory of the process in this phase.",
                label="process",
            ),
            value_column(
                "host_peak_bytes",
                MetricUnit.BYTES,
                "Highest known used memory of the host in this phase.",
                label="host",
            ),
        ),
    )

    @property
    def goodput_basis(self) -> str:
        """The wall time that the goodput is a part of, as in `of 3.2 s`."""
        return f"of {format_ns(self.wall_ns)}{'' if self.is_whole else ', as far as recorded'}"

    @property
    def progress(self) -> str:
        """The steps over all attempts: `46 completed steps in 3 attempts, 6 lost at a restart`."""
        least = "" if self.is_whole else "at least "
        steps = f"{least}{plural(self.num_steps, 'completed step')}"
        known = "known to be " if least else ""
        where = "a restart" if self.num_attempts == 2 else "restarts"
        lost = f", {self.num_lost_steps} {known}lost at {where}" if self.num_lost_steps else ""
        return f"{steps} in {plural(self.num_attempts, 'attempt')}{lost}"

    @property
    def restarts(self) -> str | None:
        """`progress` of a run with several attempts; None: it has one."""
        return self.progress if self.num_attempts > 1 else None

    def rows(self) -> Sequence[PhaseTime]:
        """The phases with time."""
        return self.phases

    def duration_ns(self, phase: str) -> int:
        """The time in a phase; 0 if the run has no time in it."""
        return next((each.duration_ns for each in self.phases if each.phase == phase), 0)


def measure_lifetime(run: RunSource, *, rank: int | None = None) -> Lifetime:
    """Split the wall time of a run, up to the opened attempt, into phases.

    Args:
        run: A recorded or emulated run.
        rank: The rank; default: the lowest recorded rank, which usually saves the checkpoints, or
            in attempts without all of its steps another one.

    Raises:
        MissingDataError: The run is imported, and a trace does not contain process times.
        IncompleteRunError: The run has no data of the rank.
    """
    return remember(run, ("lifetime", rank), partial(_measure_lifetime, run, rank))


def measure_known_lifetime(run: RunSource) -> Lifetime | None:
    """Measure the phases of a run that recorded its processes; None for other runs."""
    return measure_lifetime(run) if any(record.life for record in run.ranks) else None


def _measure_lifetime(run: RunSource, rank: int | None) -> Lifetime:
    if run.manifest.source == "imported":
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} is imported: a trace does not show when its processes "
            "started and ended. Expected a run of the recorder. Record the training to see its "
            "phases."
        )
    lowest = min((record.rank for record in run.ranks), default=0)
    chosen = find_record(run, lowest if rank is None else rank).rank
    sources = [*run.earlier_attempts, run]
    attempts, notes = [], []
    for source in sources:
        if not source.ranks:
            continue
        try:
            each = _read_attempt(source, chosen) if rank is not None else _follow(source, chosen)
        except StoreError as error:
            if source is run:
                raise
            notes.append(f"An earlier attempt is left out. {error}")
            continue
        has_other_start = _begins_unlike(sources[0], source, each.rank)
        attempts.append(replace(each, has_other_start=has_other_start))
    notes += [note for each in attempts for note in each.notes]
    notes += _note_missing([each.number for each in attempts])
    return _Life(attempts).measure(run.manifest.run_id, chosen, notes)


def _note_missing(numbers: Sequence[int]) -> Iterator[str]:
    """Name the missing attempts before the first of these, then those between them."""
    wall = f"the wall time begins with attempt {numbers[0]}"
    for known, where in (((-1, numbers[0]), wall), (numbers, "{} time is a restart")):
        if missing := find_missing_numbers(known):
            names = format_attempts(missing)
            its = "their" if names.startswith("attempts") else "its"
            rest = where.format(its)
            yield f"The data of {names} are missing: {its} steps are not counted, and {rest}."


def _follow(run: RunSource, rank: int) -> "_Attempt":
    """An attempt of a rank, or of another one if that has rows of more steps.

    Raises:
        StoreError: No rank of the attempt can be read.
    """
    try:
        own = _read_attempt(run, rank)
    except StoreError as error:
        others = [each.rank for each in run.ranks if each.rank != rank]
        is_here = len(others) < len(run.ranks)
        reason = str(error) if is_here else f"The attempt has no data of rank {rank}."
        for other in others:
            with suppress(StoreError):
                return _read_attempt(run, other, instead_of=reason)
        raise
    if own.lacking:
        more = [each for each in run.ranks if each.num_steps > len(own.steps)]
        for record in sorted(more, key=lambda each: -each.num_steps):
            with suppress(StoreError):
                return _read_attempt(run, record.rank, instead_of=own.lacking)
    return own


@dataclass(frozen=True)
class _Attempt:
    """One attempt of one rank, with wall times in ns."""

    number: int
    rank: int
    start_ns: int
    end_ns: int
    status: RunStatus
    life: ProcessLife
    """Times of the process on the clock of the rank. Add `offset_ns` for wall times."""
    offset_ns: int
    first_step_ns: int
    """Start of the training; without a step, the time at which the recorder attached."""
    steps: NDArray[np.int64]
    """Shape (S, 3): number, start and end of each completed step, by start."""
    is_plain: NDArray[np.bool_]
    """Whether each step is plain, and so has no waits, shape (S,)."""
    parts_ns: Mapping[str, NDArray[np.int64]]
    """Time of each step by part name, shape (S,); 0 for waits in plain steps."""
    idle: Intervals
    evaluation: Intervals
    checkpoint: Intervals
    saved_ns: int | None
    """Start of the last checkpoint that was saved completely."""
    lacking: str
    """The sentence that rows of completed steps are missing; empty: none are."""
    is_whole: bool
    """Whether all of its steps and checkpoints are known."""
    samples: NDArray[np.int64]
    """Shape (n, 3): time, resident memory of the process, used memory of the host; -1: unknown."""
    notes: tuple[str, ...]
    has_other_start: bool = False
    """Whether its parameters are known not to be those with which the first attempt began."""

    def span(self, span: TimeSpan) -> Intervals:
        return Intervals.of([span.start_ns + self.offset_ns], [span.end_ns + self.offset_ns])

    def spans(self, spans: Sequence[TimeSpan]) -> Intervals:
        starts, ends = ([getattr(span, name) for span in spans] for name in ("start_ns", "end_ns"))
        return Intervals.of(
            np.array(starts, np.int64) + self.offset_ns, np.array(ends, np.int64) + self.offset_ns
        )

    @property
    def is_interrupted(self) -> NDArray[np.bool_]:
        """Whether each step contains a compilation or a standstill, shape (S,)."""
        apart = self.idle.union(self.spans(self.life.compiles))
        covered = apart.covered_ns(self.steps[:, 1], self.steps[:, 2])
        interrupted: NDArray[np.bool_] = covered > 0
        return interrupted

    def has_loaded(self, before: "_Attempt") -> bool:
        """Whether the recorder saw this attempt load a checkpoint."""
        loads = self.spans(self.life.loads).ends
        return bool(len(loads)) and int(loads[-1]) > before.end_ns

    def lost_since_ns(self, following: "_Attempt | None") -> int | None:
        """The time after which steps are lost; None: no step is. See [Note: Steps that count]."""
        if following is None:
            return None
        continues = following.has_loaded(self) or following.has_other_start
        return self.saved_ns if continues and self.saved_ns is not None else self.start_ns


def _begins_unlike(first: RunSource, later: RunSource, rank: int) -> bool:
    """Whether two attempts are known to begin with other values of the sampled parameters."""
    seen = [each.training for run in (first, later) for each in run.ranks if each.rank == rank]
    known = [each for each in seen if each is not None and each.updates]
    if len(known) < 2 or len({tuple(part.name for part in each.parameters) for each in known}) > 1:
        return False
    return known[0].updates[0].digests != known[1].updates[0].digests


def _read_attempt(run: RunSource, rank: int, *, instead_of: str = "") -> _Attempt:
    """The attempt of a rank; `instead_of` states why it is not that of the chosen rank.

    Raises:
        StoreError: The rank has no data, or its data are damaged.
    """
    record = find_record(run, rank)
    offset = record.clock_start.unix_ns - record.clock_start.monotonic_ns
    life = record.life or ProcessLife()
    events = run.events(rank)
    is_step = events.kind == EventKind.STEP
    found = events.where(is_step)
    steps = np.stack([found.step, found.start_ns + offset, found.end_ns + offset], axis=1)
    between = events.where(events.kind == EventKind.BETWEEN_STEPS)
    is_save = (between.flags & EventFlag.CHECKPOINT) != 0
    started = [life.started_ns, life.imported_ns, record.clock_start.monotonic_ns]
    notes, end = [], _end_of(run, record, events, offset)
    saved_ns = _saved_ns(run, record, events)
    completed = completed_steps(run, record)
    if instead_of:
        notes.append(f"Attempt {record.attempt} is measured on rank {rank}. {instead_of}")
    lacking = ""
    if len(steps) < completed and record.status is not RunStatus.RUNNING:
        lacking = (
            f"Rank {rank} completed {plural(completed, 'step')} of attempt {record.attempt}, but "
            f"has rows of {len(steps)}"
            + (": a killed process loses its last ones." if record.clock_end is None else ".")
        )
        notes.append(f"{lacking} A checkpoint saved in the missing steps is unknown.")
    if life.started_ns is None:
        notes.append(
            f"The start of the process of attempt {record.attempt} is unknown: its time begins "
            "later."
        )
    return _Attempt(
        number=record.attempt,
        rank=rank,
        start_ns=min([each + offset for each in started if each is not None], default=0)
        if life.started_ns is None
        else life.started_ns + offset,
        end_ns=end,
        status=record.status,
        life=life,
        offset_ns=offset,
        first_step_ns=int(steps[0, 1]) if len(steps) else record.clock_start.monotonic_ns + offset,
        steps=steps,
        is_plain=(found.flags & EventFlag.PLAIN_STEP) != 0,
        parts_ns=_parts_of(run, rank, found.step),
        idle=_idle_of(run, record, offset, end),
        evaluation=_shifted(between, ~is_save, offset),
        checkpoint=_shifted(between, is_save, offset),
        saved_ns=saved_ns,
        lacking=lacking,
        is_whole=not lacking and not (instead_of and saved_ns is None),
        samples=_samples_of(run, rank, life, offset),
        notes=tuple(notes),
    )


def _saved_ns(run: RunSource, record: RankRecord, events: EventTable) -> int | None:
    """The start of the last checkpoint that was saved completely; None: none was.

    If this rank saved none, the lowest one may have saved that of all ranks.
    """
    offset = record.clock_start.unix_ns - record.clock_start.monotonic_ns
    flags = events.flags & (EventFlag.CHECKPOINT | EventFlag.ASYNC)
    is_save = (events.kind == EventKind.BETWEEN_STEPS) & (flags == EventFlag.CHECKPOINT)
    background = () if record.life is None else record.life.background_saves
    saves: list[int] = events.start_ns[is_save].tolist()
    saves += [span.start_ns for span in background]
    if saves:
        return max(saves) + offset
    lowest = min(run.ranks, key=lambda each: each.rank)
    if lowest.rank == record.rank:
        return None
    with suppress(StoreError):
        return _saved_ns(run, lowest, run.events(lowest.rank, kinds=[EventKind.BETWEEN_STEPS]))
    return None


def _shifted(rows: EventTable, mask: NDArray[np.bool_], offset: int) -> Intervals:
    return Intervals.of(rows.start_ns[mask] + offset, rows.end_ns[mask] + offset)


def _end_of(run: RunSource, record: RankRecord, events: EventTable, offset: int) -> int:
    """The end of a recording, or its last sign of life if it did not end normally."""
    if record.clock_end is not None:
        return record.clock_end.monotonic_ns + offset
    signs = [record.clock_start.unix_ns, record.flushed_unix_ns]
    signs += [int(events.end_ns.max()) + offset] if len(events) else []
    times = run.devices(record.rank).time_ns
    signs += [int(times.max()) + offset] if len(times) else []
    box = run.black_box(record.rank)
    if box is not None:
        signs.append(box.header.ended_unix_ns or box.header.sign_unix_ns)
    return max(signs)


def _idle_of(run: RunSource, record: RankRecord, offset: int, end_ns: int) -> Intervals:
    """The completed standstills, and the standstill in which the attempt ended."""
    spans = [] if record.life is None else list(record.life.standstills)
    starts, ends = [span.start_ns + offset for span in spans], [s.end_ns + offset for s in spans]
    box = run.black_box(record.rank)
    if box is not None and box.header.hang_seen_ns and record.status is not RunStatus.COMPLETE:
        starts.append(box.header.changed_ns + offset)
        ends.append(max(end_ns, starts[-1]))
    return Intervals.of(starts, ends)


def _parts_of(
    run: RunSource, rank: int, steps: NDArray[np.int32]
) -> Mapping[str, NDArray[np.int64]]:
    """The parts of each step, shape (S,); 0 if the summary lacks the step."""
    kinds = {
        "exposed": [*EXPOSED_PART_CODES],
        "data": [StepPart.DATA],
        "host-bound": [StepPart.HOST_BOUND],
    }
    rows = run.summary(ranks=[rank], kinds=[kind for each in kinds.values() for kind in each])
    parts = {name: rows_of(rows, kinds=each) for name, each in kinds.items()}
    return {name: sum_per_step(own.step, own.duration_ns, steps) for name, own in parts.items()}


def _samples_of(run: RunSource, rank: int, life: ProcessLife, offset: int) -> NDArray[np.int64]:
    devices = run.devices(rank)
    sampled = np.stack([devices.time_ns, devices.process_rss, devices.host_memory_used], axis=1)
    marks = [(mark.time_ns, mark.rss_bytes, MISSING_INT) for mark in life.memory_marks]
    samples = np.concatenate([sampled, np.array(marks, np.int64).reshape(-1, 3)])
    samples[:, 0] += offset
    return samples


class _Life:
    """The phases of all attempts of one rank."""

    def __init__(self, attempts: Sequence[_Attempt]) -> None:
        self._attempts = attempts
        self._spans: dict[LifePhase, Intervals] = dict.fromkeys(LifePhase, Intervals.empty())
        self._covered = Intervals.empty()
        for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
            self._add_attempt(attempt, following)
        wall = Intervals.of(
            [min(each.start_ns for each in attempts)],
            [max(max(each.start_ns, each.end_ns) for each in attempts)],
        )
        self._spans[LifePhase.RESTART] = wall.subtract(self._covered)
        self._wall_ns = wall.duration_ns

    def measure(self, run_id: str, rank: int, notes: Sequence[str]) -> Lifetime:
        durations = {phase: spans.duration_ns for phase, spans in self._spans.items()}
        parts, scaled = self._training_parts()
        num_attempts = self._attempts[-1].number + 1
        num_lost = sum(int(mask.sum()) for mask in map(self._is_lost, range(len(self._attempts))))
        return Lifetime(
            run_id=run_id,
            rank=rank,
            wall_ns=self._wall_ns,
            goodput_ratio=self._ratio(durations[LifePhase.TRAINING]),
            phases=tuple(
                self._phase(phase, duration) for phase, duration in durations.items() if duration
            ),
            training_parts=parts,
            background_checkpoint_ns=self._background_ns(),
            num_attempts=max(num_attempts, len(self._attempts)),
            num_steps=sum(len(each.steps) for each in self._attempts),
            num_lost_steps=num_lost,
            is_whole=num_attempts <= len(self._attempts)
            and all(each.is_whole for each in self._attempts),
            notes=(*notes, *self._lost_notes(), *scaled),
        )

    # --- the phases

    def _add_attempt(self, attempt: _Attempt, following: _Attempt | None) -> None:
        """Assign each moment of an attempt to its phase, unless an earlier attempt has it."""
        own = Intervals.of([attempt.start_ns], [attempt.end_ns]).subtract(self._covered)
        left = own
        spans = _phases_of(attempt, following)
        for phase in _IN_ORDER:
            taken = spans.get(phase, Intervals.empty()).intersect(left)
            self._spans[phase] = self._spans[phase].union(taken)
            left = left.subtract(taken)
        self._spans[LifePhase.OTHER] = self._spans[LifePhase.OTHER].union(left)
        self._covered = self._covered.union(own)

    def _is_lost(self, place: int) -> NDArray[np.bool_]:
        following = self._attempts[place + 1] if place + 1 < len(self._attempts) else None
        return _is_lost(self._attempts[place], following)

    def _lost_notes(self) -> list[str]:
        notes = []
        for place, (attempt, following) in enumerate(pairwise(self._attempts)):
            lost = int(self._is_lost(place).sum())
            which = f"{lost} of {len(attempt.steps)} steps of attempt {attempt.number} are lost"
            has_loaded, is_saved = following.has_loaded(attempt), attempt.saved_ns is not None
            if is_saved and not has_loaded and following.has_other_start:
                notes.append(
                    f"{which}, if attempt {following.number} loaded the last checkpoint: its "
                    "parameters are not the first ones, but the recorder saw it load none."
                )
            elif lost:
                why = f"attempt {following.number} loaded a checkpoint saved before them"
                if not is_saved:
                    why = "the recorder saw no complete checkpoint of it"
                elif not has_loaded:
                    why = f"the recorder saw attempt {following.number} load no checkpoint"
                notes.append(f"{which}: {why}.")
        return notes

    # --- numbers of a phase

    def _ratio(self, duration_ns: int) -> float:
        return duration_ns / self._wall_ns if self._wall_ns else 0.0

    def _phase(self, phase: LifePhase, duration_ns: int) -> PhaseTime:
        spans = self._spans[phase]
        process, host = [], []
        for attempt in self._attempts:
            inside = attempt.samples[spans.holds(attempt.samples[:, 0])]
            process += [int(inside[:, 1].max(initial=MISSING_INT)), _rise(attempt, spans)]
            host.append(int(inside[:, 2].max(initial=MISSING_INT)))
        return PhaseTime(
            phase.value,
            duration_ns,
            self._ratio(duration_ns),
            if_known(max(process)),
            if_known(max(host)),
        )

    def _training_parts(self) -> tuple[tuple[PhaseTime, ...], list[str]]:
        """The parts, and a note if the waits of plain steps are those of the detailed ones."""
        sums = Counter[str]()
        counted = []
        detailed = np.zeros(2, np.int64)
        whole = np.zeros(2, np.int64)
        for place, attempt in enumerate(self._attempts):
            counts = ~self._is_lost(place) & ~attempt.is_interrupted
            counts[:1] = False  # the first step
            times = attempt.steps[:, 2] - attempt.steps[:, 1]
            for total, chosen in ((whole, counts), (detailed, counts & ~attempt.is_plain)):
                total += (chosen.sum(), times[chosen].sum())
            sums.update({name: int(own[counts].sum()) for name, own in attempt.parts_ns.items()})
            counted.append(np.stack([attempt.steps[:, 0], times, attempt.is_plain], axis=1)[counts])
        steps, times, is_plain = np.concatenate(counted).T
        other = find_other_plain_steps(steps, times, is_plain != 0)
        unit = 0 if other else 1
        scale = float(whole[unit] / max(detailed[unit], 1))
        parts = {name: round(ns * (1 if name == "data" else scale)) for name, ns in sums.items()}
        note = (
            f"The waits of {detailed[0]} of {whole[0]} steps are recorded (detailed steps). "
            "Exposed and host-bound time is scaled to all of them"
            + (" by their number, because plain steps take other times." if other else ".")
        )
        return (
            tuple(PhaseTime(name, ns, self._ratio(ns)) for name, ns in parts.items()),
            [note] if detailed[0] < whole[0] else [],
        )

    def _background_ns(self) -> int:
        written = Intervals.empty()
        for attempt in self._attempts:
            written = written.union(attempt.spans(attempt.life.background_saves))
        return written.subtract(self._spans[LifePhase.CHECKPOINT]).duration_ns


def _phases_of(attempt: _Attempt, following: _Attempt | None) -> Mapping[LifePhase, Intervals]:
    """The spans of each phase, which may overlap."""
    steps, is_lost = attempt.steps, _is_lost(attempt, following)
    life, offset = attempt.life, attempt.offset_ns
    imported = attempt.start_ns if life.imported_ns is None else life.imported_ns + offset

    def of_steps(mask: NDArray[np.bool_]) -> Intervals:
        return Intervals.of(steps[mask, 1], steps[mask, 2])

    is_first = np.arange(len(steps)) == 0
    rest = Intervals.of([steps[-1, 2] if len(steps) else attempt.first_step_ns], [attempt.end_ns])
    has_failed = attempt.status in (RunStatus.FAILED, RunStatus.CUT_OFF)
    lost = of_steps(is_lost & ~is_first)
    phases = {
        LifePhase.CHECKPOINT: attempt.checkpoint,
        LifePhase.EVALUATION: attempt.evaluation,
        LifePhase.COMPILE: attempt.spans(life.compiles),
        LifePhase.IDLE: attempt.idle,
        LifePhase.FIRST_STEP: of_steps(is_first),
        LifePhase.TRAINING: of_steps(~is_lost & ~is_first),
        LifePhase.LOST: lost.union(rest) if has_failed else lost,
        LifePhase.LOAD: attempt.spans(life.loads),
        LifePhase.START: Intervals.of([attempt.start_ns], [imported]),
        LifePhase.BUILD: Intervals.of([imported], [attempt.first_step_ns]),
    }
    if life.shard is not None:
        phases[LifePhase.SHARD] = attempt.span(life.shard)
    if attempt.status is RunStatus.COMPLETE:
        phases[LifePhase.END] = rest
    return phases


def _is_lost(attempt: _Attempt, following: _Attempt | None) -> NDArray[np.bool_]:
    """Whether a restart lost each step, shape (S,). See [Note: Steps that count]."""
    since = attempt.lost_since_ns(following)
    if since is None:
        return np.zeros(len(attempt.steps), dtype=bool)
    lost: NDArray[np.bool_] = attempt.steps[:, 2] > since
    return lost


def _rise(attempt: _Attempt, spans: Intervals) -> int:
    """The peak memory of the process inside the spans; -1 if unknown.

    A peak is known if the high-water mark rose between two marks. It lies in these spans if they
    cover the whole time between the marks.
    """
    marks = attempt.life.memory_marks
    begin = attempt.life.started_ns
    times = [*([] if begin is None else [begin]), *(mark.time_ns for mark in marks)]
    peaks = [*([] if begin is None else [0]), *(mark.high_water_bytes for mark in marks)]
    moments = np.array(times, np.int64) + attempt.offset_ns
    known = [
        after
        for (low, before), (high, after) in pairwise(zip(moments.tolist(), peaks, strict=True))
        if after > before and spans.clip(low, high).duration_ns == high - low > 0
    ]
    return max(known, default=MISSING_INT)
