"""Split the time of a step into parts that add up to it.

All parts lie on one clock of one rank, the compute stream (CPU: the main thread), and are split by
`reduction.step_parts`. The breakdown of a run is that of its typical step ([Note: the typical step]
in `analysis.step_selection`), rounded to nanoseconds so that the parts still add up. Its exposed
parts are also split by dimension of the device mesh.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.mesh_dimensions import GroupDimensions, group_dimensions
from fsdp_inspect.analysis.step_selection import RankSteps, split_by_rank, timed_ranks
from fsdp_inspect.columns import TableSpec, metric_column, text_column, value_column
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.statistics import apportion
from fsdp_inspect.trace.codes import EXPOSED_PART_CODES, PARTS_OF_STEP, EventKind, StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import SummaryTable, rows_of

_KINDS = (
    EventKind.STEP,
    *PARTS_OF_STEP,
    StepPart.COMMUNICATION,
    StepPart.BETWEEN_STEPS,
    StepPart.GROUP,
)
"""The summary rows that a breakdown reads."""
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
    """The parts in the order of `PARTS_OF_STEP`. Their durations add up to `step_time_ns`
    exactly."""
    exposed_ns: int
    """Sum of the exposed parts."""
    closest_step: int
    """The step of `steps` whose time is closest to `step_time_ns`, as an example."""
    communication_ns: int
    """Union of the rank's running collectives. It overlaps the parts."""
    between_ns: int
    """Time of evaluation and checkpoints before the step, which `step_time_ns` does not contain."""
    dimensions: tuple[DimensionTime, ...] = ()
    """The collectives by dimension of the mesh. Exposed times add up to `exposed_ns`, and counts
    and bytes add up to those of the step."""

    def duration_ns(self, part: StepPart) -> int:
        """Return the time of one part."""
        return next(row.duration_ns for row in self.parts if row.name == part.label)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The typical step of the run and of each rank."""

    headline: StepBreakdown | None
    """The typical step of the median rank; None without a timed step."""
    ranks: tuple[StepBreakdown, ...]
    """The typical step of each rank, by rank."""


def measure_breakdown(run: RunSource) -> Breakdown:
    """Split the typical step into parts, for the run and for each rank."""
    return remember(run, "breakdown", partial(_measure_breakdown, run))


def _measure_breakdown(run: RunSource) -> Breakdown:
    timed = timed_ranks(run)
    ranks = tuple(_split_typical_steps(run, timed.members))
    median = timed.median
    return Breakdown(
        headline=next((row for row in ranks if median and row.rank == median.rank), None),
        ranks=ranks,
    )


def measure_step_breakdown(run: RunSource, *, rank: int, step: int) -> StepBreakdown:
    """Split one step into parts. The step need not be a timed step.

    Raises:
        IncompleteRunError: The rank did not complete this step.
    """
    rows = run.summary(ranks=[rank], kinds=_KINDS)
    finished = rows.step[rows.kind == EventKind.STEP]
    if step not in finished:
        known = f"{finished.min()} to {finished.max()}" if len(finished) else "none"
        raise IncompleteRunError(
            f"Step {step} not found: rank {rank} of run {run.manifest.run_id!r} did not complete "
            f"it. Completed steps: {known}. Choose one of them."
        )
    return _split(rows.where(rows.step == step), group_dimensions(run, rank))


def split_typical_step(run: RunSource, member: RankSteps) -> StepBreakdown:
    """Split the typical step of a rank into parts.

    Args:
        run: The run of the rank.
        member: The steps of the rank, at least one.
    """
    rows = rows_of(member.rows, kinds=_KINDS)
    chosen = rows.where(np.isin(rows.step, member.typical_steps))
    return _split(chosen, group_dimensions(run, member.rank))


def _split_typical_steps(run: RunSource, members: Sequence[RankSteps]) -> Iterator[StepBreakdown]:
    """Split the typical step of each rank. The summary is read by kind, which limits memory."""
    keys = np.sort(
        np.concatenate(
            [_keys(np.int64(member.rank), member.typical_steps) for member in members]
            or [np.empty(0, dtype=np.int64)]
        )
    )
    rows = SummaryTable.concat(
        [_at(run.summary(kinds=[kind]), keys) for kind in _KINDS if len(members)]
    )
    ordered = rows.where(np.argsort(rows.rank, kind="stable"))
    for rank, own in split_by_rank(ordered).items():
        yield _split(own, group_dimensions(run, rank))


def _keys(rank: NDArray[np.int64] | np.int64, step: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return one number for each pair of rank and step."""
    keys: NDArray[np.int64] = (rank << 32) + step
    return keys


def _at(rows: SummaryTable, keys: NDArray[np.int64]) -> SummaryTable:
    """Return the rows with these keys; the keys ascend."""
    own = _keys(rows.rank.astype(np.int64), rows.step)
    place = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
    return rows.where(keys[place] == own)


def _split(rows: SummaryTable, dimensions: GroupDimensions) -> StepBreakdown:
    """Split the mean over the steps of the rows, which belong to one rank."""
    is_whole = rows.kind == EventKind.STEP
    whole_steps, whole_ns = rows.step[is_whole], rows.duration_ns[is_whole]
    steps = np.unique(rows.step)
    by_kind = np.zeros(max(_KINDS) + 1, dtype=np.int64)
    np.add.at(by_kind, rows.kind, rows.duration_ns)

    def mean(kind: int) -> int:
        return round(float(by_kind[kind] / len(steps)))

    total = mean(EventKind.STEP)
    sums = by_kind[list(PARTS_OF_STEP)]
    exposed = round(float(sums[_IS_EXPOSED].sum() / len(steps)))
    durations = np.zeros(len(sums), dtype=np.int64)
    durations[_IS_EXPOSED] = apportion(sums[_IS_EXPOSED] / len(steps), exposed)
    durations[~_IS_EXPOSED] = apportion(sums[~_IS_EXPOSED] / len(steps), total - exposed)
    return StepBreakdown(
        rank=int(rows.rank[0]),
        steps=tuple(steps.tolist()),
        step_time_ns=total,
        parts=tuple(
            PartTime(part.label, duration, duration / total if total else 0.0)
            for part, duration in zip(PARTS_OF_STEP, durations.tolist(), strict=True)
        ),
        exposed_ns=exposed,
        closest_step=int(whole_steps[np.argmin(np.abs(whole_ns - whole_ns.mean()))]),
        communication_ns=mean(StepPart.COMMUNICATION),
        between_ns=mean(StepPart.BETWEEN_STEPS),
        dimensions=_split_by_dimension(rows, dimensions, exposed_ns=exposed, step_time_ns=total),
    )


def _split_by_dimension(
    rows: SummaryTable, dimensions: GroupDimensions, *, exposed_ns: int, step_time_ns: int
) -> tuple[DimensionTime, ...]:
    """Split the collectives of the steps of the rows by dimension of the mesh."""
    num_steps = len(np.unique(rows.step))
    rows = rows_of(rows, kinds=[StepPart.GROUP])
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
