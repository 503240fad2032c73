"""Log the storages of a memory step, and compute from it the live bytes at each moment.

`recording.storage_tracker` writes the log while a step runs. All results are computed from the log
after the step. A storage that is classified late therefore has its category for its whole life. For
example, an all-gather output is known only when its unit is unsharded.

Conventions: sizes are the storages' own bytes, without an allocator's rounding, cache or
workspaces. Cut c is the moment after the first c events. Pure Python and numpy, no torch.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import NamedTuple

from fsdp_inspect.trace.codes import (
    OF_COMMUNICATION,
    MemoryCategory,
    MemoryPoint,
    Method,
    Phase,
)
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable

_OFFLOADED = frozenset(
    {
        MemoryCategory.SHARDED_PARAMETER,
        MemoryCategory.SHARDED_GRADIENT,
        MemoryCategory.OPTIMIZER_STATE,
    }
)
"""The categories that an offload policy puts on the host."""

Ownership = Mapping[tuple[int, MemoryCategory], int]
"""Live bytes by owning unit (-1: none) and category; no entry with 0 bytes."""


StorageKey = tuple[int, MemoryCategory, int]
"""The owning unit (-1: none), the category and the number of the allocating line (0: unknown)."""


class Moment(NamedTuple):
    """The position in the training, and the time, of an event."""

    unit: int
    """The innermost unit on the host's stack; -1: none."""
    phase: int
    """A `Phase`."""
    time_ns: int
    """Host monotonic time."""
    recompute: bool = False
    """Whether activation checkpointing was repeating a forward."""


class StorageEvent(NamedTuple):
    """An allocation, a resize or a release of a storage."""

    storage: int
    """Index into `StorageLog.storages`."""
    num_bytes: int
    """Its size after this event; 0 after a release."""
    moment: Moment


@dataclass(slots=True)
class TrackedStorage:
    """The owner and category of one storage."""

    owner_unit: int
    category: MemoryCategory | None = None
    """None: derived from its allocation and release, see `StorageLog.categories`."""
    place: int = 0
    """The number of the user's line that allocated it; 0: unknown."""


@dataclass(frozen=True, slots=True)
class MemoryInstant:
    """The live bytes at one moment."""

    moment: Moment
    owned: Ownership

    @property
    def total_bytes(self) -> int:
        """Bytes of all live storages."""
        return sum(self.owned.values())

    @property
    def by_category(self) -> dict[MemoryCategory, int]:
        """Live bytes by category; they add up to `total_bytes`."""
        totals: Counter[MemoryCategory] = Counter()
        for (_, category), num_bytes in self.owned.items():
            totals[category] += num_bytes
        return dict(totals)

    @property
    def by_owner(self) -> dict[int, dict[MemoryCategory, int]]:
        """Live bytes by owning unit, then category; units ascending. Adds up to `total_bytes`."""
        return {
            owner: {category: num_bytes for (_, category), num_bytes in members}
            for owner, members in groupby(sorted(self.owned.items()), key=lambda item: item[0][0])
        }


@dataclass(frozen=True, slots=True)
class MemoryMark:
    """The live bytes at a point that the recorder's hooks choose."""

    point: MemoryPoint
    microbatch: int
    instant: MemoryInstant
    peak_bytes: int
    """The most live bytes since the previous mark (or the step's begin), both ends included."""
    peak_compute_bytes: int
    """The same without `codes.OF_COMMUNICATION`."""


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """The live bytes at the first use of a parameter in a pass of its unit."""

    unit: int
    parameter: int
    """Its index among the unit's parameters."""
    microbatch: int
    instant: MemoryInstant
    peak_bytes: int
    """The most live bytes from this use until the next use in the pass, or the next mark."""
    peak_compute_bytes: int
    """The same without `codes.OF_COMMUNICATION`."""


@dataclass(slots=True)
class UnitPass:
    """A forward or backward of a unit, with the first use of each parameter."""

    unit: int
    microbatch: int
    uses: dict[int, "_Cut"] = field(default_factory=dict)
    """The cut of the first use, by the parameter's index in the unit."""
    end: int | None = None
    """The cut at which the pass ended; None if it did not end."""


@dataclass(frozen=True, slots=True)
class TrackedStepMemory:
    """The memory of one step, in bytes of live storages."""

    start: MemoryInstant
    """The resting memory before the step."""
    peak: MemoryInstant
    """The first moment with the most live bytes."""
    peak_microbatch: int
    """The microbatch of the last mark before the peak; 0 without such a mark."""
    end: MemoryInstant
    """The resting memory after the step."""
    marks: tuple[MemoryMark, ...]
    phases: tuple[MemoryInstant, ...]
    """The peak of each phase of the step, in the order in which the phases first occur."""
    uses: tuple[ParameterUse, ...] = ()

    def rows(self, step: int) -> Iterator[tuple[int, ...]]:
        """Yield the step's rows of `MemoryTable`: marks, peak, moments by owner, parameter uses.

        The moments are the peak, the peak of each phase, and the end.
        Allocator columns (reserved, active) and bytes outside the allocator are unknown and -1. A
        PEAK_BY_OWNER row has the bytes of one owner; together these rows are the peak.
        """
        for mark in self.marks:
            yield _row(
                mark.instant.by_category,
                {"step": step, "microbatch": mark.microbatch, "point": mark.point},
                mark.instant.moment,
                mark.peak_bytes,
                mark.peak_compute_bytes,
            )
        where = {"step": step, "microbatch": self.peak_microbatch}
        yield from _whole(self.peak, {**where, "point": MemoryPoint.PEAK})
        yield from _by_owner(self.peak, {**where, "point": MemoryPoint.PEAK_BY_OWNER})
        for instant in self.phases:
            yield from _whole(instant, {"step": step, "point": MemoryPoint.PHASE_PEAK})
            yield from _by_owner(instant, {"step": step, "point": MemoryPoint.PHASE_PEAK_BY_OWNER})
        yield from _by_owner(self.end, {"step": step, "point": MemoryPoint.END_BY_OWNER})
        for use in self.uses:
            where = {"point": MemoryPoint.PARAMETER_USE, "parameter": use.parameter}
            yield _row(
                use.instant.by_category,
                {**where, "step": step, "microbatch": use.microbatch},
                use.instant.moment._replace(unit=use.unit),
                use.peak_bytes,
                use.peak_compute_bytes,
            )


class LiveStorages(NamedTuple):
    """Storages that are alive together and have the same owner, category and line."""

    owner_unit: int
    category: MemoryCategory
    place: int
    """The number of the line that allocated them; 0: unknown."""
    num_bytes: int
    num_storages: int


@dataclass(slots=True)
class StorageLog:
    """The storage events of one step, in their order."""

    storages: list[TrackedStorage] = field(default_factory=list)
    events: list[StorageEvent] = field(default_factory=list)
    _marks: list["_MarkAt"] = field(default_factory=list)
    _passes: list[UnitPass] = field(default_factory=list)
    _start: "_Cut | None" = None
    _end: "_Cut | None" = None

    def begin(self, moment: Moment) -> None:
        """Begin the step: all events so far belong to the resting memory."""
        self._start = _Cut(len(self.events), moment)

    def mark(self, point: MemoryPoint, microbatch: int, moment: Moment) -> None:
        """Add a mark at this moment."""
        self._marks.append(_MarkAt(point, microbatch, _Cut(len(self.events), moment)))

    def begin_pass(self, unit: int, microbatch: int) -> UnitPass:
        """Begin a unit's forward or backward; call `use` and `end_pass` on it later."""
        self._passes.append(UnitPass(unit, microbatch))
        return self._passes[-1]

    def use(self, unit_pass: UnitPass, parameter: int, moment: Moment) -> None:
        """Note that the pass uses a parameter for the first time."""
        unit_pass.uses[parameter] = _Cut(len(self.events), moment)

    def end_pass(self, unit_pass: UnitPass) -> None:
        """End the pass."""
        unit_pass.end = len(self.events)

    def finish(self, moment: Moment) -> None:
        """End the step; later events do not belong to it."""
        self._end = _Cut(len(self.events), moment)

    def summarize(self, *, host_units: Collection[int] = ()) -> TrackedStepMemory:
        """Compute the memory of the step between `begin` and `finish`.

        Args:
            host_units: Units whose shards, gradients and optimizer state are on the host although
                the tensors' devices do not show it; they are excluded.
        """
        if host_units:
            return self.on_device(host_units).summarize()
        assert self._start is not None, "begin() comes before summarize()"
        assert self._end is not None, "finish() comes before summarize()"
        categories = self.categories()
        of_compute = [category not in OF_COMMUNICATION for category in categories]
        totals, of_compute_totals = self._totals(), self._totals(of_compute)
        peak = self._peak(totals, self._start, self._end)
        phases = self._phase_peaks(totals, self._start, self._end)
        cuts = [self._start, peak, self._end, *phases, *(mark.cut for mark in self._marks)]
        used = [cut for each in self._passes for cut in each.uses.values()]
        owned = self._owned_at({cut.position for cut in (*cuts, *used)}, categories)
        start, at_peak, end, *others = (
            MemoryInstant(cut.moment, owned[cut.position]) for cut in cuts
        )
        at_phases, at_marks = others[: len(phases)], others[len(phases) :]
        opened = [self._start.position, *(mark.cut.position for mark in self._marks)]
        marks = tuple(
            MemoryMark(
                mark.point,
                mark.microbatch,
                instant,
                peak_bytes=max(totals[since : mark.cut.position + 1]),
                peak_compute_bytes=max(of_compute_totals[since : mark.cut.position + 1]),
            )
            for mark, instant, since in zip(self._marks, at_marks, opened, strict=False)
        )
        before = [mark.microbatch for mark in self._marks if mark.cut.position < peak.position]
        microbatch = before[-1] if before else 0
        uses = tuple(self._uses(totals, of_compute_totals, owned))
        return TrackedStepMemory(start, at_peak, microbatch, end, marks, tuple(at_phases), uses)

    def categories(self) -> list[MemoryCategory]:
        """The category of each storage: its classification, or else derived from its lifetime.

        Without a classification, a storage is INPUT if it was allocated in the data phase, or
        outside any phase and reached the forward. It is ACTIVATION if it was allocated in a forward
        or its recompute and outlived it, or outside any phase and reached the backward. Otherwise
        it is TEMPORARY.
        """
        lifetimes = self._lifetimes()
        return [
            storage.category
            if storage.category is not None
            else _default_category(lifetimes.get(index))
            for index, storage in enumerate(self.storages)
        ]

    def until(self, position: int, moment: Moment) -> "StorageLog":
        """The log as if the step had ended after the first `position` events.

        Storages that are freed later count as alive. The releases of a propagating exception do not
        change their categories.
        """
        assert self._start is not None, "begin() comes before until()"
        passes = [
            UnitPass(
                each.unit,
                each.microbatch,
                {name: cut for name, cut in each.uses.items() if cut.position <= position},
                None if each.end is None or each.end > position else each.end,
            )
            for each in self._passes
        ]
        return StorageLog(
            storages=self.storages,
            events=self.events[:position],
            _marks=[mark for mark in self._marks if mark.cut.position <= position],
            _passes=[each for each in passes if each.uses],
            _start=self._start,
            _end=_Cut(position, moment),
        )

    def alive_at(self, position: int) -> list[LiveStorages]:
        """The live storages after the first `position` events, by owner, category and line."""
        sizes: dict[int, int] = {}
        for event in self.events[:position]:
            sizes[event.storage] = event.num_bytes
        categories = self.categories()
        totals: Counter[tuple[int, MemoryCategory, int]] = Counter()
        counts: Counter[tuple[int, MemoryCategory, int]] = Counter()
        for index, num_bytes in sizes.items():
            if num_bytes:
                storage = self.storages[index]
                key = (storage.owner_unit, categories[index], storage.place)
                totals[key] += num_bytes
                counts[key] += 1
        return [LiveStorages(*key, num_bytes, counts[key]) for key, num_bytes in totals.items()]

    def changes(self) -> tuple[dict[StorageKey, int], list[tuple[int, StorageKey, int]]]:
        """The live bytes at the start of the finished step, and every change until its end.

        Returns:
            Bytes by owner, category and line, and the changes as time, key and bytes.
        """
        assert self._start is not None, "begin() comes before changes()"
        assert self._end is not None, "finish() comes before changes()"
        keys = [
            (storage.owner_unit, category, storage.place)
            for storage, category in zip(self.storages, self.categories(), strict=True)
        ]
        sizes = [0] * len(self.storages)
        start: Counter[StorageKey] = Counter()
        changes = []
        for position, event in enumerate(self.events[: self._end.position]):
            key, change = keys[event.storage], event.num_bytes - sizes[event.storage]
            sizes[event.storage] = event.num_bytes
            if position < self._start.position:
                start[key] += change
            elif change:
                changes.append((event.moment.time_ns, key, change))
        return {key: size for key, size in start.items() if size}, changes

    @property
    def begin_position(self) -> int:
        """The number of events before the step."""
        assert self._start is not None, "begin() comes before begin_position"
        return self._start.position

    def highest(self, unit: int, phase: int) -> tuple[int, Moment]:
        """The highest moment of the finished step in a unit and phase, or else its peak.

        Returns:
            The number of events before the moment, and the moment.
        """
        assert self._start is not None, "begin() comes before highest()"
        assert self._end is not None, "finish() comes before highest()"
        totals = self._totals()
        own = [
            position
            for position in range(self._start.position + 1, self._end.position + 1)
            if self.events[position - 1].moment[:2] == (unit, phase)
        ]
        if not own:
            peak = self._peak(totals, self._start, self._end)
            return peak.position, peak.moment
        position = max(own, key=totals.__getitem__)
        return position, self.events[position - 1].moment

    def phase_peaks(self) -> list[tuple[int, Moment]]:
        """The highest moment of each phase of the finished step, in the order of the step.

        Returns:
            The number of events before each, and the moment. They are the moments of the rows that
            `summarize` gives for the phases.
        """
        assert self._start is not None, "begin() comes before phase_peaks()"
        assert self._end is not None, "finish() comes before phase_peaks()"
        peaks = self._phase_peaks(self._totals(), self._start, self._end)
        return [(cut.position, cut.moment) for cut in peaks]

    @property
    def end(self) -> tuple[int, Moment]:
        """The number of events until the end of the step, and that moment."""
        assert self._end is not None, "finish() comes before end"
        return self._end.position, self._end.moment

    def on_device(self, host_units: Collection[int]) -> "StorageLog":
        """The same log with the size of storages on the host set to 0; all cuts stay the same.

        If all shards are on the host, the optimizer also computes there.

        Args:
            host_units: As for `summarize`; without any, the log itself is returned.
        """
        if not host_units:
            return self
        known = list(zip(self.storages, self.categories(), strict=True))
        sharded = {
            storage.owner_unit
            for storage, category in known
            if category is MemoryCategory.SHARDED_PARAMETER
        }
        on_host = {
            index
            for index, (storage, category) in enumerate(known)
            if category in _OFFLOADED and storage.owner_unit in host_units
        }
        if sharded <= set(host_units):
            allocated_in: dict[int, int] = {}
            for event in self.events:
                allocated_in.setdefault(event.storage, event.moment.phase)
            on_host |= {index for index, phase in allocated_in.items() if phase == Phase.OPTIMIZER}
        events = [
            event._replace(num_bytes=0) if event.storage in on_host else event
            for event in self.events
        ]
        return replace(self, events=events)

    def _totals(self, counts: Sequence[bool] | None = None) -> list[int]:
        """Live bytes at every cut; shape (len(events) + 1,).

        Args:
            counts: Whether to include each storage, by storage; None means all.
        """
        sizes = [0] * len(self.storages)
        changes = []
        for event in self.events:
            is_added = counts is None or counts[event.storage]
            changes.append(event.num_bytes - sizes[event.storage] if is_added else 0)
            sizes[event.storage] = event.num_bytes
        return list(accumulate(changes, initial=0))

    def _uses(
        self, totals: list[int], of_compute: list[int], owned: Mapping[int, Ownership]
    ) -> Iterator[ParameterUse]:
        """Yield the parameters' uses in the passes that ended."""
        samples = [mark.cut.position for mark in self._marks]
        for unit_pass in self._passes:
            if unit_pass.end is None:
                continue
            until = [*(cut.position for cut in unit_pass.uses.values()), unit_pass.end]
            for (parameter, cut), following in zip(unit_pass.uses.items(), until[1:], strict=True):
                sample = bisect_right(samples, cut.position)
                end = min([following, *samples[sample : sample + 1]])
                instant = MemoryInstant(cut.moment, owned[cut.position])
                highest = (max(each[cut.position : end + 1]) for each in (totals, of_compute))
                yield ParameterUse(
                    unit_pass.unit, parameter, unit_pass.microbatch, instant, *highest
                )

    def _peak(self, totals: list[int], start: "_Cut", end: "_Cut") -> "_Cut":
        """The first cut of the step with the highest total."""
        position = max(range(start.position, end.position + 1), key=totals.__getitem__)
        if position == start.position:
            return start
        return _Cut(position, self.events[position - 1].moment)

    def _phase_peaks(self, totals: list[int], start: "_Cut", end: "_Cut") -> list["_Cut"]:
        """The first cut with the highest total after an event of each phase."""
        highest: dict[int, int] = {}
        for position in range(start.position + 1, end.position + 1):
            phase = self.events[position - 1].moment.phase
            if phase not in highest or totals[position] > totals[highest[phase]]:
                highest[phase] = position
        return [_Cut(position, self.events[position - 1].moment) for position in highest.values()]

    def _owned_at(
        self, positions: set[int], categories: Sequence[MemoryCategory]
    ) -> dict[int, Ownership]:
        """The live bytes by owner and category at each of the cuts."""
        keys = [
            (storage.owner_unit, category)
            for storage, category in zip(self.storages, categories, strict=True)
        ]
        sizes = [0] * len(self.storages)
        owned: Counter[tuple[int, MemoryCategory]] = Counter()
        snapshots: dict[int, Ownership] = {0: {}}
        for position, event in enumerate(self.events, start=1):
            owned[keys[event.storage]] += event.num_bytes - sizes[event.storage]
            sizes[event.storage] = event.num_bytes
            if position in positions:
                snapshots[position] = {key: size for key, size in owned.items() if size}
        return snapshots

    def _lifetimes(self) -> dict[int, "_Lifetime"]:
        """The part from the first allocation to the first release after it, by storage index."""
        parts: list[Moment] = []
        lifetimes: dict[int, _Lifetime] = {}
        for storage, num_bytes, moment in self.events:
            if not parts or _part(moment) != _part(parts[-1]):
                parts.append(moment)
            lifetime = lifetimes.get(storage)
            if lifetime is None and num_bytes:
                lifetimes[storage] = _Lifetime(parts, allocated_in=len(parts) - 1)
            elif lifetime is not None and not num_bytes and lifetime.freed_in is None:
                lifetime.freed_in = len(parts) - 1
        return lifetimes


class _Cut(NamedTuple):
    position: int
    moment: Moment


class _MarkAt(NamedTuple):
    point: MemoryPoint
    microbatch: int
    cut: _Cut


@dataclass(slots=True)
class _Lifetime:
    """The parts of the step in which a storage was allocated and freed.

    A part is a sequence of consecutive events with the same phase and the same recompute flag.
    """

    parts: list[Moment]
    """The first moment of every part of the step; shared by all lifetimes."""
    allocated_in: int
    freed_in: int | None = None

    @property
    def outlived_its_part(self) -> bool:
        return self.freed_in is None or self.freed_in > self.allocated_in

    def reached_next(self, phase: Phase) -> bool:
        following = self.parts[self.allocated_in + 1 : self.allocated_in + 2]
        return self.outlived_its_part and [moment.phase for moment in following] == [phase]


def _part(moment: Moment) -> tuple[int, bool]:
    return moment.phase, moment.recompute


def _default_category(lifetime: _Lifetime | None) -> MemoryCategory:
    if lifetime is None:
        return MemoryCategory.TEMPORARY
    first = lifetime.parts[lifetime.allocated_in]
    outside = first.phase == Phase.OUTSIDE
    if first.phase == Phase.DATA or (outside and lifetime.reached_next(Phase.FORWARD)):
        return MemoryCategory.INPUT
    if first.phase == Phase.FORWARD or first.recompute:
        is_activation = lifetime.outlived_its_part
    else:
        is_activation = outside and lifetime.reached_next(Phase.BACKWARD)
    return MemoryCategory.ACTIVATION if is_activation else MemoryCategory.TEMPORARY


def _whole(instant: MemoryInstant, where: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    yield _row(instant.by_category, where, instant.moment, instant.total_bytes)


def _by_owner(instant: MemoryInstant, where: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    for owner, categories in instant.by_owner.items():
        yield _row(categories, where, instant.moment._replace(unit=owner), MISSING_INT)


def _row(
    categories: Mapping[MemoryCategory, int],
    where: Mapping[str, int],
    moment: Moment,
    peak_bytes: int,
    peak_compute_bytes: int = MISSING_INT,
) -> tuple[int, ...]:
    """One row in the column order of `MemoryTable`; missing columns are -1."""
    values = {
        **where,
        "phase": moment.phase,
        "unit": moment.unit,
        "method": Method.MEASURED,
        "time_ns": moment.time_ns,
        "allocated": sum(categories.values()),
        "peak_allocated": peak_bytes,
        "peak_compute": peak_compute_bytes,
        **{
            category.label: categories.get(category, 0)
            for category in MemoryCategory
            if category is not MemoryCategory.OUTSIDE_ALLOCATOR
        },
    }
    return tuple(int(values.get(column, MISSING_INT)) for column in MemoryTable.DTYPES)
