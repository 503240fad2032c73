"""Measure how much communication hides behind compute, on each rank."""

from dataclasses import dataclass

from fsdp_inspect.analysis.step_selection import timed_ranks
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class RankOverlap:
    """Communication of one rank in its typical step."""

    rank: int
    host: str
    num_steps: int
    step_time_ns: int
    communication_ns: int
    """Union of the rank's running collectives over all streams."""
    exposed_ns: int
    """The time in which the compute stream (CPU: the main thread) waits for a running
    collective."""
    overlap_ratio: float
    """1 - exposed / communication, 0 to 1; 1.0 without communication."""
    communication_bytes: int | None
    """Sum of the full padded messages of one step; None if some sizes are unknown."""
    collectives_per_step: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of every rank and of the median rank."""

    run: RankOverlap | None
    """The median rank; None without a timed step."""
    ranks: tuple[RankOverlap, ...]
    """The ranks, ascending. Ranks without a timed step are absent."""


def ratio_of_overlap(exposed_ns: int, communication_ns: int) -> float:
    """The part of communication that is not exposed, 0 to 1; 1.0 without communication."""
    return 1 - exposed_ns / communication_ns if communication_ns else 1.0


def measure_overlap(run: RunSource) -> Overlap:
    """Measure the communication of each rank and its exposed part.

    Source:
        The complement of HTA's communication/computation overlap: 1 - exposed / communication.
    """
    timed = timed_ranks(run)
    typical, hosts = timed.typical, {record.rank: record.host for record in run.ranks}
    is_sized = not run.manifest.num_unsized_collectives
    columns = (
        typical.rank,
        typical.num_timed,
        typical.step_time_ns,
        typical.communication_ns,
        typical.exposed_ns,
        typical.rounded(EventKind.STEP, "bytes"),
        typical.means(EventKind.STEP, "count"),
    )
    ranks = tuple(
        RankOverlap(
            rank=rank,
            host=hosts.get(rank, ""),
            num_steps=num_steps,
            step_time_ns=step_time,
            communication_ns=communication,
            exposed_ns=exposed,
            overlap_ratio=ratio_of_overlap(exposed, communication),
            communication_bytes=num_bytes if is_sized else None,
            collectives_per_step=count,
        )
        for rank, num_steps, step_time, communication, exposed, num_bytes, count in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )
    median_rank = timed.median.rank if timed.median else None
    return Overlap(
        run=next((overlap for overlap in ranks if overlap.rank == median_rank), None),
        ranks=ranks,
    )
