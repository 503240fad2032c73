"""Measure the bandwidth of a run's collectives, by kind and process group.

A transfer is the part of a collective in which its own bytes travel. If other ranks recorded the
collective, it is the shortest duration over the ranks, because the last rank to arrive does not
wait. Otherwise it is the time from the collective's turn on its communicator
(`analysis.shared_collectives`) to its end. That time includes the wait for ranks that arrive later,
and on a backend that blocks the host also queueing and wake-up. Bus and algorithm bandwidth are
those of nccl-tests (`trace.links`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.link_fit import LinkFit, fit_link
from fsdp_inspect.analysis.step_selection import RankSteps, inspected_rank, sum_per_step
from fsdp_inspect.analysis.wait_causes import Waits, read_waits
from fsdp_inspect.columns import Column, TableSpec, metric_column, number_column, text_column
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.trace.codes import EventFlag, EventKind, Method, Phase
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import ProcessGroup, RunSource
from fsdp_inspect.trace.tables import EventTable, Rows


@dataclass(frozen=True, slots=True)
class KindBandwidth:
    """The collectives of one kind on one process group, over the timed steps of one rank."""

    kind: str
    group: int | None
    """Index into the manifest's process groups; None if unknown."""
    group_role: str
    """`shard`, `replicate`, `post_forward`, `other`, or `` if the group is unknown."""
    group_size: int | None
    """Number of ranks that take part."""
    num_events: int
    num_bounds: int
    """Collectives whose end is only an upper bound. Transfers and bandwidths leave them out, and
    are unknown if these have most of the bytes."""
    num_sizes: int
    bytes_per_step: int
    """Sum of the messages in the typical step."""
    transfer_ns: int | None
    """Mean transfer of one collective."""
    transfer_from: str
    """Source of the transfer times. `all_ranks`: the minimum over ranks; `rank`: this rank's own
    times; `mixed`: both."""
    method: str
    """Method of the times: `measured`, `inferred`, `host_blocking`; several joined with `, `."""
    algorithm_bytes_per_s: float | None
    """Sum of the messages / sum of the transfer times. Large messages have the largest weight."""
    bus_bytes_per_s: float | None
    """Sum of the bus bytes / sum of the transfer times; None if the kind has no bus bytes, or the
    group is unknown."""
    link: LinkFit | None
    """Fit of latency + bandwidth; None if no message has bytes and a duration. The factor of
    collectives other than all-gather, reduce-scatter and all-reduce is 1."""


def _group_of(row: KindBandwidth) -> str | None:
    return None if row.group is None else f"{row.group_role} of {row.group_size or '?'}"


def _fit_of(row: KindBandwidth) -> LinkFit | None:
    return row.link if row.link is not None and row.link.refusal is None else None


def _latency_of(row: KindBandwidth) -> float | None:
    """The fitted latency; None: the messages do not show one above 0."""
    fit = _fit_of(row)
    return None if fit is None else fit.latency_ns or None


LINKS = TableSpec(
    "Bandwidth by collective",
    (
        text_column(
            "collective", "The kind of collective.", lambda row: row.kind.replace("_", "-")
        ),
        text_column("group", "The role of the process group and its size.", _group_of),
        number_column("num_events", "The collectives of the timed steps.", label="n"),
        metric_column("bytes_per_step", metric="communication_bytes", label="per step"),
        metric_column("transfer_ns"),
        metric_column(
            "algorithm_bytes_per_s", metric="bus_bytes_per_s", label="algorithm bandwidth"
        ),
        metric_column("bus_bytes_per_s", label="bus"),
        metric_column("latency_ns", _latency_of),
        metric_column(
            "fit_bus_bytes_per_s",
            lambda row: fit.bus_bytes_per_s if (fit := _fit_of(row)) else None,
            metric="bus_bytes_per_s",
            label="bus of the fit",
        ),
        Column(
            "residual_ratio",
            "residual",
            "median distance of the collectives from the fit",
            MetricUnit.RATIO,
            lambda row: fit.residual_ratio if (fit := _fit_of(row)) else None,
        ),
    ),
)
"""The columns of `KindBandwidth`."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The bandwidth of one rank's communicators."""

    rank: int
    num_steps: int
    kinds: tuple[KindBandwidth, ...]
    """The collectives by kind and group, most bytes first."""


def measure_bandwidth(
    run: RunSource,
    *,
    rank: int | None = None,
    unit: int | None = None,
    transfer_ns: NDArray[np.int64] | None = None,
) -> Bandwidth | None:
    """Measure the bandwidth of a rank's collectives.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.
        unit: Index of a unit, to limit the collectives. The fit of latency + bandwidth always uses
            all collectives of the kind and group.
        transfer_ns: The transfer time from all ranks, for each of the rank's
            `analysis.wait_causes.timed_collectives` in their order; -1 if unknown.

    Returns:
        None if the rank has no timed step.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None:
        return None
    transfers = _Transfers.of(read_waits(run, member), transfer_ns)
    groups = {group.index: group for group in run.manifest.process_groups}
    own = transfers if unit is None else transfers.of_unit(unit)
    kinds = [
        _measure_kind(
            own.of_kind(kind, group),
            groups.get(group),
            member,
            fitted=transfers.of_kind(kind, group),
        )
        for kind, group in own.kinds()
    ]
    return Bandwidth(
        rank=member.rank,
        num_steps=len(member.steps),
        kinds=tuple(sorted(kinds, key=lambda one: -one.bytes_per_step)),
    )


@dataclass(frozen=True, slots=True)
class _Transfers(Rows):
    """The collectives of training, with their transfer times."""

    collectives: EventTable
    duration_ns: NDArray[np.int64]
    from_all_ranks: NDArray[np.bool_]

    @classmethod
    def of(cls, waits: Waits, transfer_ns: NDArray[np.int64] | None) -> "_Transfers":
        collectives = waits.collectives
        duration = collectives.end_ns - waits.turn_ns
        from_all_ranks = np.zeros(len(collectives), dtype=bool)
        if transfer_ns is not None:
            from_all_ranks = transfer_ns > 0
            duration = np.where(from_all_ranks, transfer_ns, duration)
        trained = collectives.phase != Phase.EVALUATION
        return cls(collectives.where(trained), duration[trained], from_all_ranks[trained])

    def kinds(self) -> list[tuple[int, int]]:
        """Return the pairs of kind and group of the collectives."""
        pairs = zip(self.collectives.kind.tolist(), self.collectives.group.tolist(), strict=True)
        return sorted(set(pairs))

    def of_kind(self, kind: int, group: int) -> "_Transfers":
        return self.where((self.collectives.kind == kind) & (self.collectives.group == group))

    def of_unit(self, unit: int) -> "_Transfers":
        return self.where(self.collectives.unit == unit)

    def fit(self, factor: float) -> LinkFit | None:
        """Fit latency + bandwidth to collectives of one kind and group."""
        return fit_link(self.collectives.bytes[self.usable], self.duration_ns[self.usable], factor)

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Whether each collective has bytes and a duration that is not only an upper bound.

        Collectives with most of the bytes do not stand for the others, so none is then usable.
        """
        is_bound = (self.collectives.flags & EventFlag.LATEST_END) != 0
        sizes = np.maximum(self.collectives.bytes, 0)
        if 2 * sizes[is_bound].sum() > sizes.sum():
            return np.zeros(len(sizes), dtype=bool)
        known: NDArray[np.bool_] = (sizes > 0) & (self.duration_ns > 0) & ~is_bound
        return known

    @property
    def source(self) -> str:
        """The source of the durations: `all_ranks`, `rank` or `mixed`."""
        if self.from_all_ranks.all():
            return "all_ranks"
        return "mixed" if self.from_all_ranks.any() else "rank"


def _measure_kind(
    own: _Transfers, group: ProcessGroup | None, member: RankSteps, *, fitted: _Transfers
) -> KindBandwidth:
    events = own.collectives
    kind = EventKind(int(events.kind[0]))
    size = len(group.ranks) if group else None
    factor = bus_factor(kind, size or 0) or None
    usable = own.usable
    message, duration = events.bytes[usable], own.duration_ns[usable]
    overall = float(message.sum() / duration.sum() * 1e9) if len(message) else None
    return KindBandwidth(
        kind=kind.label,
        group=group.index if group else None,
        group_role=group.role if group else "",
        group_size=size,
        num_events=len(events),
        num_bounds=int(np.count_nonzero(events.flags & EventFlag.LATEST_END)),
        num_sizes=len(np.unique(message)),
        bytes_per_step=member.typical(
            sum_per_step(events.step, np.maximum(events.bytes, 0), member.steps)
        ),
        transfer_ns=round(duration.mean()) if len(duration) else None,
        transfer_from=own.source,
        method=", ".join(Method(method).label for method in np.unique(events.method).tolist()),
        algorithm_bytes_per_s=overall,
        bus_bytes_per_s=overall * factor if overall and factor else None,
        link=fitted.fit(factor or 1.0),
    )
