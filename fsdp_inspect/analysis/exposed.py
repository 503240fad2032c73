"""Measure the exposed communication of a rank, by owner and by cause.

Exposed time belongs to the collective that is waited for, and so to the unit that owns it. If a
rank waits for two collectives at once, the time counts for both. So the owners can add up to more
than the step's exposed time, which is a union. `analysis.wait_causes` defines the causes. Every
time is a time of the rank's typical step ([Note: the typical step] in
`store.reduction.timed_steps`), so causes add up to the exposed time, and kinds to the exposed time
of the breakdown.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.breakdown import DimensionTime, measure_rank_breakdown
from fsdp_inspect.analysis.link_fit import fit_link
from fsdp_inspect.analysis.mesh_dimensions import GroupDimensions, group_dimensions
from fsdp_inspect.analysis.step_selection import (
    RankSteps,
    collective_rows,
    inspected_rank,
    timed_ranks,
)
from fsdp_inspect.analysis.wait_causes import NEEDED_KINDS, Cause, Waits, read_waits, split_waits
from fsdp_inspect.columns import TableSpec, metric_column, number_column, text_column, unit_column
from fsdp_inspect.formatting import format_cause, format_owner
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.statistics import apportion
from fsdp_inspect.store.reduction.collective_order import find_usual_place
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.mesh_dimensions import OTHER, order_labels
from fsdp_inspect.trace.run import RunManifest, RunSource
from fsdp_inspect.trace.tables import (
    EventTable,
    SummaryTable,
    if_known,
    positions_by_value,
    rows_of,
)

_MOST_RESIDUAL, _LEAST_EXPLAINED = 0.2, 0.5
"""The latency of a fit counts as known with at most this residual and at least this explained
ratio. Waits for other ranks, which are part of durations, fail both."""
MOST_EVIDENCE = 10
"""The highest number of waits that are listed as evidence."""


@dataclass(frozen=True, slots=True)
class ExposedOwner:
    """One unit's collectives of one kind in one phase, in the typical step."""

    unit: int
    """Index into the manifest's units; -1: no unit."""
    fqn: str | None
    """The unit's name; None for communication without a unit."""
    is_fsdp: bool | None
    """Whether FSDP issued it; None if the source does not record it (traces without ranges)."""
    kind: str
    """`all_gather`, `reduce_scatter`, ..."""
    phase: str
    """The phase in which the collective was issued: `forward`, `backward`, ..."""
    dimension: str
    """The dimension of the mesh: `shard`, `tp`, ...; `other` if it is unknown."""
    count_per_step: float
    duration_ns: int
    """Time in flight per step, exposed or not."""
    exposed_ns: int
    """Exposed time per step."""
    step_ratio: float
    """Exposed time / step time, 0 to 1."""
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, largest first, without causes of 0. The causes add up to
    `exposed_ns`."""

    @property
    def floor_ns(self) -> int:
        """The part of `exposed_ns` whose cause is the floor: it cannot be hidden."""
        return self.causes_ns.get(Cause.FLOOR.label, 0)


@dataclass(frozen=True, slots=True)
class ExposedPass:
    """The collectives of one kind, phase and mesh dimension, of all units, in the typical step."""

    kind: str
    phase: str
    dimension: str
    """The dimension of the mesh; see `ExposedOwner`."""
    num_units: int
    """Number of units that own these collectives; 0 if they belong to no unit."""
    count_per_step: float
    exposed_ns: int
    """Exposed time per step. Simultaneous waits count for each collective."""
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, largest first, without causes of 0. The causes add up to
    `exposed_ns`."""


@dataclass(frozen=True, slots=True)
class OtherCommunication:
    """Collectives that FSDP did not issue, of one kind, phase and mesh dimension."""

    kind: str
    phase: str
    dimension: str
    """The dimension of the mesh: `tp`, `world`, ...; `other` if it is unknown."""
    exposed_ns: int
    """Exposed time per step."""
    count_per_step: float = 0.0
    """Those that are exposed."""
    place: str = ""
    """`file:line` of the script that issues most collectives of this kind; empty: unknown."""


@dataclass(frozen=True, slots=True)
class ExposedDimension:
    """The exposed time of one dimension of the mesh in the typical step, by cause."""

    time: DimensionTime
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, largest first, without causes of 0. Simultaneous waits count for
    each collective. Without simultaneous waits, the causes add up to `time.exposed_ns`. Empty if
    the rank's events are missing."""


def _kind_of(row: ExposedOwner | ExposedPass) -> str:
    return row.kind.replace("_", "-")


def format_cause_ratios(causes_ns: Mapping[str, int]) -> str:
    """Causes with their fractions of an exposed time: `floor 60%, late issue 40%`."""
    total = sum(causes_ns.values())
    return ", ".join(
        f"{format_cause(cause, in_list=True)} {duration / total:.0%}"
        for cause, duration in causes_ns.items()
    )


def _causes_of(row: ExposedOwner | ExposedPass | ExposedDimension) -> str:
    return format_cause_ratios(row.causes_ns)


def _caused_ns(cause: str, row: ExposedOwner) -> int:
    return row.causes_ns.get(cause, 0)


OWNERS = TableSpec(
    "Exposed communication by unit",
    (
        unit_column(
            "The unit whose collective is waited for.",
            lambda owner: format_owner(owner.fqn, owner.is_fsdp, owner.dimension),
        ),
        text_column("collective", "The kind of collective.", _kind_of),
        text_column("phase", "The phase in which it was issued."),
        text_column("dimension", "The dimension of the device mesh."),
        metric_column("exposed_ns", label="exposed"),
        metric_column("step_ratio"),
        metric_column("duration_ns", metric="communication_ns", label="in flight"),
        metric_column("count_per_step", label="per step"),
        text_column("causes", "Fractions of the exposed time by cause.", _causes_of),
        *(
            metric_column(
                f"cause_{cause.label}_ns",
                partial(_caused_ns, cause.label),
                metric=f"{cause.label}_ns",
                label=format_cause(cause.label),
            )
            for cause in Cause
        ),
    ),
)
"""The columns of `ExposedOwner`."""

PASSES = TableSpec(
    "Exposed communication by collective",
    (
        text_column("collective", "The kind of collective.", _kind_of),
        text_column("phase", "The phase in which it was issued."),
        text_column("dimension", "The dimension of the device mesh."),
        metric_column("count_per_step", label="per step"),
        number_column("num_units", "The units that own some.", label="units"),
        metric_column("exposed_ns", label="exposed"),
        text_column("causes", "Fractions of the exposed time by cause.", _causes_of),
    ),
)
"""The columns of `ExposedPass`."""


EXPOSED_DIMENSIONS = TableSpec(
    "Exposed communication by mesh dimension",
    (
        text_column("dimension", "The dimension of the mesh.", lambda row: row.time.dimension),
        metric_column("exposed_ns", lambda row: row.time.exposed_ns, label="exposed"),
        metric_column("step_ratio", lambda row: row.time.step_ratio, label="share"),
        metric_column("count_per_step", lambda row: row.time.count_per_step, label="per step"),
        text_column("causes", "Fractions of the exposed time by cause.", _causes_of),
    ),
)
"""The columns of `ExposedDimension`."""


@dataclass(frozen=True, slots=True)
class CauseTime:
    """The exposed time of one cause."""

    name: str
    """The name of a `Cause`."""
    duration_ns: int
    ratio: float
    """Fraction of the exposed time, 0 to 1."""


CAUSES = TableSpec(
    "Exposed communication by cause",
    (
        text_column(
            "cause",
            "Why the rank waits.",
            lambda row: row.name,
            show=format_cause,
        ),
        metric_column("duration_ns", metric="exposed_ns", label="exposed"),
        metric_column("ratio", metric="step_ratio", label="share"),
        text_column(
            "definition",
            "The definition of the cause.",
            lambda row: find_metric(f"{row.name}_ns").definition,
        ),
    ),
)
"""The columns of `CauseTime`."""


def list_causes(causes_ns: Mapping[str, int]) -> list[CauseTime]:
    """Causes as rows of `CAUSES`, in the given order."""
    total = sum(causes_ns.values()) or 1
    return [CauseTime(name, duration, duration / total) for name, duration in causes_ns.items()]


@dataclass(frozen=True, slots=True)
class Ahead:
    """The previous collective in the queue of the communicator."""

    fqn: str | None
    """The unit's name; None: the collective belongs to no unit."""
    is_fsdp: bool | None
    """See `ExposedOwner`."""
    kind: str
    dimension: str
    """See `ExposedOwner`."""
    end_ns: int
    """End of the collective, from the start of the step."""


@dataclass(frozen=True, slots=True)
class ExposedWait:
    """One exposed wait. All times except durations count from the start of its step."""

    step: int
    microbatch: int
    fqn: str | None
    """The owner of the wait; None: no unit."""
    is_fsdp: bool | None
    """See `ExposedOwner`."""
    kind: str
    phase: str
    dimension: str
    """See `ExposedOwner`."""
    issue_ns: int
    """Time at which the host issues the collective."""
    start_ns: int
    """Time at which the collective starts on its stream."""
    need_ns: int
    """Time at which the compute stream (CPU: the main thread) begins to wait for the collective."""
    end_ns: int
    exposed_ns: int
    median_ns: int
    """Median exposed time of the `count` collectives with its owner, kind and phase."""
    count: int
    """Number of these collectives in the timed steps."""
    cause: str
    """The cause with the largest part of the wait."""
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, largest first, without causes of 0. The causes add up to
    `exposed_ns`."""
    ahead: Ahead | None
    """The previous collective in the queue; None: there is none in this step."""
    bytes: int | None
    group: int | None
    """Index into the manifest's process groups."""
    sequence: int | None
    """Sequence number in the group. It is equal on all ranks."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """Exposed communication of one rank in its typical step."""

    rank: int
    num_steps: int
    """Number of typical steps. Every time is a mean over them."""
    step_time_ns: int
    communication_ns: int
    exposed_ns: int
    step_ratio: float
    """Exposed time / step time, 0 to 1."""
    backward_gathers_ns: int
    """Exposed time of FSDP's all-gathers in backward, which `reshard_after_forward=False`
    removes."""
    late_prefetch_ns: int
    """Exposed time by late issue of FSDP's all-gathers in backward after the first one, and all
    exposed time of unused ones. In a backward with unused ones, also all exposed time of those that
    were not prefetched."""
    latency_ns: int
    """Exposed time that messages without bytes would have, too; 0 if the latency is unknown."""
    by_kind_ns: dict[str, int]
    """Exposed time by collective: `all_gather`, `reduce_scatter`, `all_reduce`, `other`."""
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, largest first, without causes of 0. The causes add up to
    `exposed_ns`. Empty if the rank's events are missing."""
    dimensions: tuple[ExposedDimension, ...]
    """Every dimension of the mesh on which the rank communicated. Exposed times add up to
    `exposed_ns`."""
    passes: tuple[ExposedPass, ...]
    """Every kind of collective in every phase and dimension, most exposed first."""
    owners: tuple[ExposedOwner, ...]
    """Every owner of communication, most exposed first."""
    not_fsdp: tuple[OtherCommunication, ...]
    """Communication that FSDP did not issue, most exposed first; empty if the source does not
    record the issuer."""
    evidence: tuple[ExposedWait, ...]
    """The longest waits of the timed steps, longest first, at most `MOST_EVIDENCE`. They are the
    longest wait of each owner, or the longest waits of a selected unit."""

    @property
    def floor_ns(self) -> int:
        """The part of `exposed_ns` whose cause is the floor: it cannot be hidden."""
        return self.causes_ns.get(Cause.FLOOR.label, 0)


def measure_exposed(
    run: RunSource,
    *,
    rank: int | None = None,
    unit: int | None = None,
    last_arrival_ns: NDArray[np.int64] | None = None,
) -> Exposed | None:
    """Measure the exposed communication of a rank, by owner and by cause.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.
        unit: Index of a unit. It limits passes, owners and evidence, but not the rank's numbers.
        last_arrival_ns: The arrival of the last rank, on this rank's clock, for each of the rank's
            `analysis.wait_causes.timed_collectives` in their order; -1 if unknown. Without it, no
            wait has the cause `straggler`.

    Returns:
        None if the rank has no timed step, or if the import shows no collective.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None or timed_ranks(run).lacks_communication:
        return None
    waits = read_waits(run, member, last_arrival_ns=last_arrival_ns)
    split = measure_rank_breakdown(run, member)
    dimensions = group_dimensions(run, member.rank)
    exposed, step_time = split.exposed_ns or 0, split.step_time_ns
    in_typical = np.isin(waits.collectives.step, member.typical_steps)
    typical = _TypicalWaits(waits.where(in_typical), len(member.typical_steps))
    return Exposed(
        rank=member.rank,
        num_steps=len(member.typical_steps),
        step_time_ns=step_time,
        communication_ns=split.communication_ns or 0,
        exposed_ns=exposed,
        step_ratio=exposed / step_time if step_time else 0.0,
        backward_gathers_ns=_backward_gathers(member),
        late_prefetch_ns=_late_prefetch(typical),
        latency_ns=_latency(typical),
        by_kind_ns=split.exposed_by_kind_ns,
        causes_ns=typical.causes_ns(typical.waits.share_by_cause_ns, exposed),
        dimensions=_find_dimensions(typical, split.dimensions, dimensions),
        passes=_find_passes(typical, unit, dimensions),
        owners=_find_owners(_OwnerKeys(run.manifest, member, dimensions), typical, unit),
        not_fsdp=_find_other(run, member.rank, typical, dimensions)
        if run.manifest.knows_fsdp
        else (),
        evidence=_Evidence(run.manifest, waits, dimensions).collect(unit),
    )


def measure_causes(
    run: RunSource,
    *,
    rank: int,
    steps: Sequence[int],
    exposed_ns: int,
    last_arrival_ns: NDArray[np.int64] | None = None,
) -> dict[str, int]:
    """Split the exposed time of some steps of a rank by cause, per step.

    Args:
        run: A recorded run.
        rank: The rank.
        steps: Completed steps of the rank, timed or not, at least one.
        exposed_ns: Mean exposed time of these steps.
        last_arrival_ns: See `measure_exposed`, for the collectives of these steps.

    Returns:
        ns by `Cause`, only causes above 0, largest first; they add up to `exposed_ns`.
    """
    events = run.events(rank, steps=list(steps), kinds=sorted(NEEDED_KINDS))
    typical = _TypicalWaits(split_waits(events, last_arrival_ns=last_arrival_ns), len(steps))
    return typical.causes_ns(typical.waits.share_by_cause_ns, exposed_ns)


def _backward_gathers(member: RankSteps) -> int:
    rows = rows_of(member.rows, kinds=[EventKind.ALL_GATHER])
    rows = rows.where((rows.phase == Phase.BACKWARD) & (rows.unit != NO_UNIT))
    return member.typical_per_step(rows, "exposed_ns")


def _late_prefetch(typical: "_TypicalWaits") -> int:
    rows, causes = typical.waits.collectives, typical.waits.share_by_cause_ns
    gathers = (rows.kind == EventKind.ALL_GATHER) & (rows.phase == Phase.BACKWARD)
    gathers = np.flatnonzero(gathers & (rows.unit != NO_UNIT))
    backward = rows.step[gathers].astype(np.int64) << 32 | rows.microbatch[gathers]
    order = np.lexsort((rows.issue_ns[gathers], backward))
    _, first = np.unique(backward[order], return_index=True)
    later, own = np.delete(gathers[order], first), np.delete(backward[order], first)
    is_unused = (rows.flags[later] & EventFlag.UNUSED) != 0
    # An unused all-gather was prefetched in place of one that was then issued at its use.
    is_displaced = (rows.flags[later] & EventFlag.PREFETCHED) == 0
    is_displaced &= np.isin(own, own[is_unused])
    whole = is_unused | is_displaced
    late = float(causes[later[whole]].sum() + causes[later[~whole], Cause.LATE_ISSUE].sum())
    return round(late / max(typical.num_steps, 1))


def _latency(typical: "_TypicalWaits") -> int:
    waits = typical.waits
    rows, total = waits.collectives, 0.0
    duration = np.maximum(rows.end_ns - waits.turn_ns, 1)
    exposed = waits.share_by_cause_ns.sum(axis=1)
    is_known = (rows.flags & EventFlag.LATEST_END) == 0
    key = rows.kind.astype(np.int64) << 32 | (rows.group + 1)
    for of_kind in (key == each for each in np.unique(key)):
        fitted = of_kind & is_known
        fit = fit_link(rows.bytes[fitted], duration[fitted], 1.0)
        if fit is None or fit.residual_ratio > _MOST_RESIDUAL:
            continue
        if fit.is_constant or (fit.refusal is None and fit.explained_ratio >= _LEAST_EXPLAINED):
            latency = fit.typical_ns if fit.is_constant else fit.latency_ns
            total += float((exposed * np.minimum(latency / duration, 1))[of_kind].sum())
    return round(total / max(typical.num_steps, 1))


@dataclass(frozen=True, slots=True)
class _TypicalWaits:
    """The waits of the typical steps, with means over these steps."""

    waits: Waits
    num_steps: int

    def where(self, mask: NDArray[np.generic]) -> "_TypicalWaits":
        return _TypicalWaits(self.waits.where(mask), self.num_steps)

    def causes_ns(self, by_cause_ns: NDArray[np.int64], exposed_ns: int | None) -> dict[str, int]:
        """Return the causes per step, only causes above 0, largest first.

        Args:
            by_cause_ns: The causes of these waits, shape (n, len(Cause)).
            exposed_ns: The sum of the causes. The sum of the events applies if this is None, or if
                it differs because events are missing.
        """
        means = by_cause_ns.sum(axis=0) / max(self.num_steps, 1)
        total = float(means.sum())
        if exposed_ns is None or abs(total - exposed_ns) > 1:
            exposed_ns = round(total)
        return name_causes(apportion(means, exposed_ns))


def name_causes(by_cause_ns: NDArray[np.int64]) -> dict[str, int]:
    """Return the causes above 0, largest first."""
    causes = sorted(Cause, key=lambda cause: -int(by_cause_ns[cause]))
    return {cause.label: int(by_cause_ns[cause]) for cause in causes if by_cause_ns[cause]}


def _find_dimensions(
    typical: _TypicalWaits, times: Sequence[DimensionTime], dimensions: GroupDimensions
) -> tuple[ExposedDimension, ...]:
    positions = dimensions.by_label(typical.waits.collectives.group)
    nothing = np.empty(0, dtype=np.int64)
    found = []
    for time in times:
        own = typical.where(positions.get(time.dimension, nothing))
        causes = own.causes_ns(own.waits.by_cause_ns, time.exposed_ns)
        found.append(ExposedDimension(time, causes))
    return tuple(found)


def _find_passes(
    typical: _TypicalWaits, only_unit: int | None, dimensions: GroupDimensions
) -> tuple[ExposedPass, ...]:
    collectives, passes = typical.waits.collectives, []
    trained = collectives.phase != Phase.EVALUATION
    if only_unit is not None:
        trained &= collectives.unit == only_unit
    labels = list(dimensions.by_label(collectives.group))
    place = dimensions.numbers(collectives.group, labels)
    columns = (column[trained].tolist() for column in (collectives.phase, collectives.kind, place))
    for phase, kind, number in sorted(set(zip(*columns, strict=True))):
        own = typical.where(
            trained & (collectives.phase == phase) & (collectives.kind == kind) & (place == number)
        )
        units = own.waits.collectives.unit
        causes = own.causes_ns(own.waits.by_cause_ns, None)
        passes.append(
            ExposedPass(
                kind=EventKind(kind).label,
                phase=Phase(phase).label,
                dimension=labels[number],
                num_units=len(np.unique(units[units != NO_UNIT])),
                count_per_step=len(units) / typical.num_steps,
                exposed_ns=sum(causes.values()),
                causes_ns=causes,
            )
        )
    return tuple(sorted(passes, key=lambda one: -one.exposed_ns))


@dataclass(frozen=True, slots=True)
class _OwnerKeys:
    """The data behind the keys of a rank's owners."""

    manifest: RunManifest
    member: RankSteps
    dimensions: GroupDimensions

    def owners(self, table: EventTable | SummaryTable) -> NDArray[np.int64]:
        """Return one number per row, which is equal for equal unit, phase, kind and dimension.

        The numbers have the order of these values.
        """
        place = self.dimensions.numbers(table.group, self.labels)
        unit, phase, kind = (
            column.astype(np.int64) for column in (table.unit, table.phase, table.kind)
        )
        keys: NDArray[np.int64] = (unit << 40) + (phase << 24) + (kind << 16) + place
        return keys

    @property
    def labels(self) -> list[str]:
        """Labels of all dimensions of the rank, in order."""
        return order_labels([OTHER, *(one.label for one in self.dimensions.by_group.values())])


def _find_owners(
    keys: _OwnerKeys, typical: _TypicalWaits, only_unit: int | None
) -> tuple[ExposedOwner, ...]:
    manifest, member = keys.manifest, keys.member
    fqns = {unit.index: unit.fqn for unit in manifest.units}
    step_time = member.typical(member.step_time_ns)
    rows = collective_rows(member.rows)
    waits_of = dict(positions_by_value(keys.owners(typical.waits.collectives)))
    no_waits, owners = np.empty(0, np.int64), []
    for owner, positions in positions_by_value(keys.owners(rows)):
        own, owned = rows.where(positions), typical.where(waits_of.get(owner, no_waits))
        unit, phase, kind = int(own.unit[0]), Phase(int(own.phase[0])), EventKind(int(own.kind[0]))
        if only_unit is not None and unit != only_unit:
            continue
        exposed = member.typical_per_step(own, "exposed_ns")
        owners.append(
            ExposedOwner(
                unit=unit,
                fqn=fqns.get(unit),
                is_fsdp=_is_fsdp(manifest, unit),
                kind=kind.label,
                phase=phase.label,
                dimension=keys.dimensions.label(int(own.group[0])),
                count_per_step=float(own.count.sum() / max(len(member.steps), 1)),
                duration_ns=member.typical_per_step(own, "duration_ns"),
                exposed_ns=exposed,
                step_ratio=exposed / step_time if step_time else 0.0,
                causes_ns=owned.causes_ns(owned.waits.by_cause_ns, exposed),
            )
        )
    return tuple(sorted(owners, key=lambda owner: -owner.exposed_ns))


def _find_other(
    run: RunSource, rank: int, typical: _TypicalWaits, dimensions: GroupDimensions
) -> tuple[OtherCommunication, ...]:
    collectives, exposed = typical.waits.collectives, typical.waits.exposed_ns
    is_other = (collectives.unit == NO_UNIT) & (exposed > 0)
    waits: dict[tuple[EventKind, str, str], list[int]] = defaultdict(list)
    for position in np.flatnonzero(is_other & (collectives.phase != Phase.EVALUATION)).tolist():
        kind = EventKind(int(collectives.kind[position]))
        phase = Phase(int(collectives.phase[position])).label
        dimension = dimensions.label(int(collectives.group[position]))
        waits[kind, phase, dimension].append(int(exposed[position]))
    box = run.black_box(rank) if waits else None
    number = max(typical.num_steps, 1)
    found = (
        OtherCommunication(
            kind.label,
            phase,
            dimension,
            exposed_ns=round(sum(own) / number),
            count_per_step=len(own) / number,
            place="" if box is None else find_usual_place(box, kind),
        )
        for (kind, phase, dimension), own in waits.items()
    )
    return tuple(sorted(found, key=lambda one: -one.exposed_ns))


def _is_fsdp(manifest: RunManifest, unit: int) -> bool | None:
    return unit != NO_UNIT if manifest.knows_fsdp else None


class _Evidence:
    """Finds and describes the longest waits."""

    def __init__(self, manifest: RunManifest, waits: Waits, dimensions: GroupDimensions) -> None:
        self._manifest = manifest
        self._dimensions = dimensions
        self._fqns = {unit.index: unit.fqn for unit in manifest.units}
        self._waits = waits

    def collect(self, unit: int | None) -> tuple[ExposedWait, ...]:
        """Return the longest waits of a unit, or the longest wait of every owner."""
        collectives, exposed = self._waits.collectives, self._waits.exposed_ns
        is_candidate = (exposed > 0) & (collectives.phase != Phase.EVALUATION)
        if unit is not None:
            is_candidate &= collectives.unit == unit
        positions = np.flatnonzero(is_candidate)
        positions = positions[np.argsort(-exposed[positions], kind="stable")]
        if unit is None:
            columns = (collectives.unit, collectives.phase, collectives.kind)
            owners = np.stack([column[positions].astype(np.int64) for column in columns], axis=1)
            firsts = np.unique(owners, axis=0, return_index=True)[1]
            positions = positions[np.sort(firsts)]
        return tuple(self._describe(one) for one in positions[:MOST_EVIDENCE].tolist())

    def _describe(self, position: int) -> ExposedWait:
        waits = self._waits
        row = {name: int(column[position]) for name, column in self._columns().items()}
        begin = int(waits.step_start_ns[position])
        causes = name_causes(waits.by_cause_ns[position])
        ahead = int(waits.ahead[position])
        columns = (waits.collectives.unit, waits.collectives.kind, waits.collectives.phase)
        alike = np.logical_and.reduce([column == column[position] for column in columns])
        return ExposedWait(
            step=row["step"],
            microbatch=row["microbatch"],
            fqn=self._fqns.get(row["unit"]),
            is_fsdp=_is_fsdp(self._manifest, row["unit"]),
            kind=EventKind(row["kind"]).label,
            phase=Phase(row["phase"]).label,
            dimension=self._dimensions.label(row["group"]),
            issue_ns=row["issue_ns"] - begin,
            start_ns=row["start_ns"] - begin,
            need_ns=int(waits.begin_ns[position]) - begin,
            end_ns=row["end_ns"] - begin,
            exposed_ns=int(waits.exposed_ns[position]),
            median_ns=round(float(np.median(waits.exposed_ns[alike]))),
            count=int(np.count_nonzero(alike)),
            cause=next(iter(causes)),
            causes_ns=causes,
            ahead=None if ahead < 0 else self._describe_ahead(ahead, begin),
            bytes=if_known(row["bytes"]),
            group=if_known(row["group"]),
            sequence=if_known(row["sequence"]),
        )

    def _describe_ahead(self, position: int, begin: int) -> Ahead:
        columns = self._columns()
        unit = int(columns["unit"][position])
        return Ahead(
            fqn=self._fqns.get(unit),
            is_fsdp=_is_fsdp(self._manifest, unit),
            kind=EventKind(int(columns["kind"][position])).label,
            dimension=self._dimensions.label(int(columns["group"][position])),
            end_ns=int(columns["end_ns"][position]) - begin,
        )

    def _columns(self) -> dict[str, NDArray[np.generic]]:
        return self._waits.collectives.columns()
