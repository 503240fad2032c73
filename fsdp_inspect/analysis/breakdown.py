"""Split the time of a step into parts that add up to it.

All parts lie on one clock of one rank, the compute stream (CPU: the main thread), and are split by
`store.reduction.step_parts`. The breakdown of a run is that of its typical step ([Note: the typical
step] in `store.reduction.timed_steps`), rounded to nanoseconds so that the parts still add up. Its
exposed parts are also split by dimension of the device mesh.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.mesh_dimensions import GroupDimensions, group_dimensions
from fsdp_inspect.analysis.step_selection import (
    RankSteps,
    TypicalSteps,
    select_steps,
    split_by_rank,
    timed_ranks,
)
from fsdp_inspect.columns import TableSpec, metric_column, text_column, value_column
from fsdp_inspect.errors import IncompleteRunError, MissingDataError
from fsdp_inspect.formatting import format_ns, format_steps
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.statistics import apportion, apportion_rows
from fsdp_inspect.trace.codes import (
    EXPOSED_PART_CODES,
    PARTS_OF_STEP,
    EventKind,
    StepFlag,
    StepPart,
)
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import StatisticsTable, SummaryTable, rows_of

_Int64 = NDArray[np.int64]

_KINDS = (
    EventKind.STEP,
    *PARTS_OF_STEP,
    StepPart.COMMUNICATION,
    StepPart.BETWEEN_STEPS,
    StepPart.HOST_BEHIND,
    StepPart.GROUP,
)
"""The summary rows that a breakdown reads."""
_OVERLAPPING = (StepPart.COMMUNICATION, StepPart.BETWEEN_STEPS)
_EXPOSED = "exposed_"
_IS_EXPOSED = np.isin([int(part) for part in PARTS_OF_STEP], list(EXPOSED_PART_CODES))


@dataclass(frozen=True, slots=True)
class PartTime:
    """One part of a step."""

    name: str
    """A `StepPart`: `forward`, `exposed_all_gather`, ..."""
    duration_ns: int
    ratio: float
    """Fraction of the step time, 0 to 1."""


@dataclass(frozen=True, slots=True)
class DimensionTime:
    """The collectives of one dimension of the device mesh, in the step."""

    dimension: str
    """`shard`, `replicate`, `tp`, `ep`, `cp`, `pp`, a user's own name, `world` or `other`: see
    [Note: the dimension of a process group] in `trace.mesh_dimensions`."""
    names: tuple[str, ...]
    """Names of the dimension in the `DeviceMesh`; in an import, names of the process groups."""
    is_inferred: bool
    """Whether the dimension of a group is inferred from ranks or names."""
    exposed_ns: int
    """Exposed time. The times of the dimensions are disjoint and add up to the exposed time of the
    step."""
    step_ratio: float
    """Exposed time / step time, 0 to 1."""
    communication_ns: int
    """Time of running collectives, exposed or not, as a sum over the process groups."""
    count_per_step: float
    bytes_per_step: int


def _names_of(row: DimensionTime) -> str:
    return ", ".join(row.names)


DIMENSIONS = TableSpec(
    "Communication by mesh dimension",
    (
        text_column("dimension", "The dimension of the device mesh."),
        metric_column("exposed_ns", label="exposed"),
        metric_column("step_ratio", label="share"),
        metric_column("communication_ns", label="in flight"),
        metric_column("count_per_step", label="per step"),
        value_column(
            "bytes_per_step", MetricUnit.BYTES, "Sum of the messages of a step.", label="bytes"
        ),
        text_column("names", "Its name in the device mesh.", _names_of, label="mesh name"),
        text_column(
            "is_inferred",
            "Recorded: the mesh, the sharder or the number of ranks states the dimension. "
            "Inferred: only ranks or names suggest it.",
            label="source",
            show=lambda is_inferred: "inferred" if is_inferred else "recorded",
        ),
    ),
)
"""The columns of `DimensionTime`."""


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """The parts of one step of one rank, or of the mean over several steps."""

    rank: int
    steps: tuple[int, ...]
    """The step, or the steps behind the mean; ascending."""
    step_time_ns: int
    parts: tuple[PartTime, ...]
    """The parts in the order of `PARTS_OF_STEP`, without the exposed ones if the import shows no
    collective. Their durations add up to `step_time_ns` exactly."""
    exposed_ns: int | None
    """Sum of the exposed parts; None if the import shows no collective."""
    closest_step: int
    """The step of `steps` whose time is closest to `step_time_ns`, as an example."""
    communication_ns: int | None
    """Union of the rank's running collectives. It overlaps the parts. None as `exposed_ns`."""
    between_ns: int
    """Time of evaluation and checkpoints before the step, which `step_time_ns` does not contain."""
    host_behind_ns: int = 0
    """Upper bound of the device's idle time for lack of work. It overlaps the parts; see [Note: the
    host behind the device] in `store.reduction.step_parts`. 0 without a device."""
    dimensions: tuple[DimensionTime, ...] = ()
    """The collectives by dimension of the mesh. Exposed times add up to `exposed_ns`, and counts
    and bytes add up to those of the step."""

    def duration_ns(self, part: StepPart) -> int:
        """Return the time of one part."""
        return next(row.duration_ns for row in self.parts if row.name == part.label)

    @property
    def exposed_ratio(self) -> float | None:
        """The exposed share of the step, 0 to 1; None if the exposed time is unknown."""
        if self.exposed_ns is None:
            return None
        return self.exposed_ns / max(self.step_time_ns, 1)

    @property
    def exposed_by_kind_ns(self) -> dict[str, int]:
        """The exposed parts by kind of collective, such as `all_gather`."""
        return {
            part.name.removeprefix(_EXPOSED): part.duration_ns
            for part in self.parts
            if part.name.startswith(_EXPOSED)
        }


@dataclass(frozen=True, slots=True)
class TypicalParts:
    """The parts of the typical step of every rank, as arrays over the ranks."""

    rank: NDArray[np.int32]
    """Shape (R,), ascending."""
    step_time_ns: _Int64
    """Shape (R,)."""
    exposed_ns: _Int64
    """Shape (R,)."""
    durations_ns: _Int64
    """Shape (R, len(PARTS_OF_STEP)). Each row adds up to the step time exactly."""
    host_behind_ns: _Int64
    """Shape (R,)."""


@dataclass(frozen=True)
class Breakdown:
    """The typical step of the run and of each rank."""

    headline: StepBreakdown | None
    """The typical step of the median rank; None without a timed step."""
    parts: TypicalParts
    """The parts of the typical step of each rank."""
    read_ranks: Callable[[], tuple[StepBreakdown, ...]] = field(repr=False, compare=False)
    """Reads `ranks`."""

    @cached_property
    def ranks(self) -> tuple[StepBreakdown, ...]:
        """The typical step of each rank, by rank. The steps are read on first access."""
        return self.read_ranks()


def measure_breakdown(run: RunSource) -> Breakdown:
    """Split the typical step into parts, for the run and for each rank."""
    return remember(run, "breakdown", partial(_measure_breakdown, run))


def _measure_breakdown(run: RunSource) -> Breakdown:
    timed = timed_ranks(run)
    typical = timed.typical
    parts = _split_sums(
        typical.rank,
        np.stack([typical.sums(kind) for kind in _KINDS[:-1]], axis=1),
        typical.num_steps,
    )

    def describe(members: Sequence[RankSteps]) -> tuple[StepBreakdown, ...]:
        return tuple(_describe_ranks(run, members, typical, parts))

    headline = describe([timed.median])[0] if timed.median else None
    return Breakdown(headline, parts, lambda: describe(timed.members))


def measure_rank_breakdown(run: RunSource, member: RankSteps) -> StepBreakdown:
    """Split the typical step of one rank into parts.

    Args:
        run: The run of the rank.
        member: The timed steps of the rank, or those that an analysis reads.
    """
    parts, typical = measure_breakdown(run).parts, timed_ranks(run).typical
    return next(_describe_ranks(run, [member], typical, parts))


def measure_dimensions(run: RunSource) -> dict[int, tuple[DimensionTime, ...]]:
    """Split the collectives of the typical step of each rank by dimension of the mesh, by rank."""
    return remember(run, "dimensions of ranks", partial(_measure_dimensions, run))


def _measure_dimensions(run: RunSource) -> dict[int, tuple[DimensionTime, ...]]:
    parts, typical = measure_breakdown(run).parts, timed_ranks(run).typical
    return _split_by_rank(run, typical, parts, np.arange(len(parts.rank)))


def _split_by_rank(
    run: RunSource, typical: TypicalSteps, parts: TypicalParts, places: _Int64
) -> dict[int, tuple[DimensionTime, ...]]:
    """Split the collectives of the ranks at some places of the columns, by rank."""
    groups = typical.by_group()
    columns = (parts.rank, typical.num_steps, parts.exposed_ns, parts.step_time_ns)
    return {
        rank: _split_by_dimension(
            groups.get(rank, StatisticsTable.empty()),
            group_dimensions(run, rank),
            num_steps=num_steps,
            exposed_ns=exposed,
            step_time_ns=step_time,
        )
        for rank, num_steps, exposed, step_time in zip(
            *(column[places].tolist() for column in columns), strict=True
        )
    }


def _describe_ranks(
    run: RunSource, members: Sequence[RankSteps], typical: TypicalSteps, parts: TypicalParts
) -> Iterator[StepBreakdown]:
    closest = typical.closest_step.tolist()
    communication = typical.rounded(StepPart.COMMUNICATION).tolist()
    between = _mean_between(run, members)
    places = np.searchsorted(typical.rank, [member.rank for member in members])
    dimensions = _split_by_rank(run, typical, parts, places)
    for place, member in zip(places.tolist(), members, strict=True):
        described = _describe(
            parts,
            place,
            steps=member.typical_steps,
            closest_step=closest[place],
            overlapping=(communication[place], between[member.rank]),
            dimensions=dimensions[member.rank],
        )
        yield _as_far_as_known(run, described)


def _mean_between(run: RunSource, members: Sequence[RankSteps]) -> dict[int, int]:
    """The mean time between the steps of each rank, ns.

    The mean is over all steps since the first timed one, also plain ones: an evaluation every 10
    steps lies before few of the typical steps, or before many of them.
    """
    ranks = [member.rank for member in members]
    rows = run.summary(ranks=ranks, kinds=[EventKind.STEP, StepPart.BETWEEN_STEPS])
    of_rank = split_by_rank(rows)
    found = {}
    for member in members:
        own = of_rank[member.rank]
        own = own.where(own.step >= member.steps[0])
        is_step = own.kind == EventKind.STEP
        found[member.rank] = round(own.duration_ns[~is_step].sum() / max(int(is_step.sum()), 1))
    return found


def measure_step_breakdown(run: RunSource, *, rank: int, step: int) -> StepBreakdown:
    """Split one step into parts. The step need not be a timed step.

    Raises:
        IncompleteRunError: The rank did not complete this step.
        MissingDataError: The step is plain: its collectives were not recorded.
    """
    rows = run.summary(ranks=[rank], kinds=_KINDS)
    finished = rows.step[rows.kind == EventKind.STEP]
    if step not in finished:
        known = f"{finished.min()} to {finished.max()}" if len(finished) else "none"
        raise IncompleteRunError(
            f"Step {step} not found: rank {rank} of run {run.manifest.run_id!r} did not complete "
            f"it. Completed steps: {known}. Choose one of them."
        )
    rows = rows.where(rows.step == step)
    of_step = rows.where(rows.kind == EventKind.STEP)
    if of_step.flags[0] & StepFlag.PLAIN:
        detailed = np.array(select_steps(run).detailed)
        near = sorted(detailed[np.argsort(np.abs(detailed - step), kind="stable")[:2]].tolist())
        known = f" Near it, {format_steps(near)} have them." if near else ""
        raise MissingDataError(
            f"Step {step} of rank {rank} took {format_ns(int(of_step.duration_ns[0]))}. It is a "
            "plain step: its units and collectives were not recorded, so its exposed time is "
            f"unknown.{known} To record all steps in detail: --overhead none."
        )
    sums = np.zeros(max(_KINDS) + 1, dtype=np.int64)
    np.add.at(sums, rows.kind, rows.duration_ns)
    parts = _split_sums(rows.rank[:1], sums[list(_KINDS[:-1])][np.newaxis], np.ones(1, np.int64))
    communication, between = (int(sums[kind]) for kind in _OVERLAPPING)
    described = _describe(
        parts,
        0,
        steps=np.array([step], dtype=np.int32),
        closest_step=step,
        overlapping=(communication, between),
        dimensions=_split_by_dimension(
            rows_of(rows, kinds=[StepPart.GROUP]),
            group_dimensions(run, rank),
            num_steps=1,
            exposed_ns=int(parts.exposed_ns[0]),
            step_time_ns=int(parts.step_time_ns[0]),
        ),
    )
    return _as_far_as_known(run, described)


def _as_far_as_known(run: RunSource, described: StepBreakdown) -> StepBreakdown:
    if not timed_ranks(run).lacks_communication:
        return described
    known = tuple(part for part in described.parts if not part.name.startswith(_EXPOSED))
    return replace(described, parts=known, exposed_ns=None, communication_ns=None)


def _split_sums(
    rank: NDArray[np.int32], sums: _Int64, num_steps: NDArray[np.integer]
) -> TypicalParts:
    """Split mean steps into parts.

    Args:
        rank: Shape (R,).
        sums: Sums over the steps, shape (R, n): the kinds of `_KINDS` without GROUP.
        num_steps: The number of these steps, shape (R,).
    """
    of_parts = sums[:, 1 : 1 + len(PARTS_OF_STEP)]
    total = np.rint(sums[:, 0] / num_steps).astype(np.int64)
    exposed = np.rint(of_parts[:, _IS_EXPOSED].sum(axis=1) / num_steps).astype(np.int64)
    durations = np.zeros_like(of_parts)
    for chosen, part_of in ((_IS_EXPOSED, exposed), (~_IS_EXPOSED, total - exposed)):
        shares = of_parts[:, chosen] / num_steps[:, np.newaxis]
        durations[:, chosen] = apportion_rows(shares, part_of)
    host_behind = sums[:, _KINDS.index(StepPart.HOST_BEHIND)] / num_steps
    return TypicalParts(rank, total, exposed, durations, np.rint(host_behind).astype(np.int64))


def _describe(
    parts: TypicalParts,
    place: int,
    *,
    steps: NDArray[np.int32],
    closest_step: int,
    overlapping: tuple[int, int],
    dimensions: tuple[DimensionTime, ...],
) -> StepBreakdown:
    total, durations = int(parts.step_time_ns[place]), parts.durations_ns[place].tolist()
    communication, between = overlapping
    return StepBreakdown(
        rank=int(parts.rank[place]),
        steps=tuple(steps.tolist()),
        step_time_ns=total,
        parts=tuple(
            PartTime(part.label, duration, duration / total if total else 0.0)
            for part, duration in zip(PARTS_OF_STEP, durations, strict=True)
        ),
        exposed_ns=int(parts.exposed_ns[place]),
        closest_step=closest_step,
        communication_ns=communication,
        between_ns=between,
        host_behind_ns=int(parts.host_behind_ns[place]),
        dimensions=dimensions,
    )


def _split_by_dimension(
    rows: SummaryTable | StatisticsTable,
    dimensions: GroupDimensions,
    *,
    num_steps: int,
    exposed_ns: int,
    step_time_ns: int,
) -> tuple[DimensionTime, ...]:
    """Split the collectives of some steps of a rank by dimension of the mesh.

    Args:
        rows: The GROUP rows of the rank in these steps, or their sums.
        dimensions: The dimensions of the groups of the rank.
        num_steps: The number of the steps.
        exposed_ns: The exposed time of their mean.
        step_time_ns: The step time of their mean.
    """
    by_label = dimensions.by_label(rows.group)
    means = {
        name: np.array([getattr(rows, name)[own].sum() / num_steps for own in by_label.values()])
        for name in ("exposed_ns", "duration_ns", "count", "bytes")
    }
    shares = apportion(means["exposed_ns"], exposed_ns)
    volumes = apportion(means["bytes"], round(float(means["bytes"].sum())))
    return tuple(
        DimensionTime(
            dimension=label,
            names=dimensions.names(rows.group[own]),
            is_inferred=dimensions.is_inferred(rows.group[own]),
            exposed_ns=int(shares[place]),
            step_ratio=int(shares[place]) / step_time_ns if step_time_ns else 0.0,
            communication_ns=round(float(means["duration_ns"][place])),
            count_per_step=float(means["count"][place]),
            bytes_per_step=int(volumes[place]),
        )
        for place, (label, own) in enumerate(by_label.items())
    )
