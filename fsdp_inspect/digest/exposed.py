"""What is there to say about a rank's waits for communication, all in one object?

Who is waited for and why, whether all-gathers were issued early, how fast the links are, and what
communication costs the compute beside it: for `fsdp-inspect exposed` and the dashboard.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.bandwidth import Bandwidth, measure_bandwidth
from fsdp_inspect.analysis.contention import Contention, measure_contention
from fsdp_inspect.analysis.exposed import Exposed, measure_exposed
from fsdp_inspect.analysis.prefetch import Prefetch, measure_prefetch
from fsdp_inspect.trace.alignment import Alignment, align_clocks, last_arrivals
from fsdp_inspect.trace.run import RunSource, Unit
from fsdp_inspect.trace.steps import RankSteps, select_steps, timed_rank
from fsdp_inspect.trace.unit_names import find_unit
from fsdp_inspect.trace.waits import timed_collectives

MOST_RANKS_ALIGNED = 32
"""Beyond it only some ranks are read to find the last arrival, spread over all."""


@dataclass(frozen=True, slots=True)
class ArrivalsKnown:
    """How far it is known when the other ranks arrived at a collective."""

    num_ranks: int
    """Ranks whose clocks are aligned with that of the rank in question, itself included."""
    num_refused: int
    """Ranks that were read and could not be aligned."""
    uncertainty_ns: int | None
    """Largest uncertainty between two of the aligned ranks; None with one rank."""
    sentence: str
    """The same in words."""


@dataclass(frozen=True, slots=True)
class WaitDigest:
    """One rank's waits for communication, over its timed steps."""

    run_id: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    backend: str
    unit: str | None
    """The unit that owners, gathers, bandwidth and evidence are limited to; None: all."""
    num_timed_steps: int
    left_out: str
    """Which steps count and which do not, in words."""
    exposed: Exposed | None
    """None without a timed step, like the others."""
    prefetch: Prefetch | None
    bandwidth: Bandwidth | None
    contention: Contention | None
    arrivals: ArrivalsKnown | None


def digest_waits(
    run: RunSource, *, rank: int | None = None, unit: str | None = None
) -> WaitDigest:
    """Ask everything about a rank's waits, and put the answers side by side.

    Args:
        run: A recorded run.
        rank: Default the median rank.
        unit: Name of a unit to limit the answers to; `(root)` is the root.

    Raises:
        IncompleteRunError: The run holds nothing of that rank.
        MissingDataError: It has no unit of that name.
    """
    chosen = None if unit is None else find_unit(run.manifest, unit)
    index = None if chosen is None else chosen.index
    member = timed_rank(run, rank)
    arrivals, last_arrival_ns = _find_arrivals(run, member) if member else (None, None)
    selection = select_steps(run)
    prefetch = measure_prefetch(run, rank=rank, unit=index)
    contention = measure_contention(run, rank=rank, unit=index)
    return WaitDigest(
        run_id=run.manifest.run_id,
        source=run.manifest.source,
        backend=run.manifest.backend,
        unit=None if chosen is None else chosen.fqn,
        num_timed_steps=len(selection.timed),
        left_out=selection.sentence,
        exposed=measure_exposed(run, rank=rank, unit=index, last_arrival_ns=last_arrival_ns),
        prefetch=prefetch,
        bandwidth=measure_bandwidth(run, rank=rank, unit=index),
        contention=contention,
        arrivals=arrivals,
    )


def _find_arrivals(
    run: RunSource, member: RankSteps
) -> tuple[ArrivalsKnown, NDArray[np.int64]]:
    """When the last rank arrived at each of the rank's collectives, as far as it is known."""
    ranks = _some_ranks([record.rank for record in run.ranks], member.rank)
    alignment = align_clocks(run, ranks)
    collectives = timed_collectives(run, member)
    arrivals = last_arrivals(run, member.rank, collectives, alignment)
    return _describe(alignment, len(run.ranks)), arrivals


def _some_ranks(ranks: Collection[int], own: int) -> list[int]:
    """All ranks, or some of many, evenly spread; the rank in question is among them."""
    ordered = sorted(ranks)
    places = np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_RANKS_ALIGNED))
    return sorted({own, *(ordered[round(place)] for place in places.tolist())})


def _describe(alignment: Alignment, num_ranks: int) -> ArrivalsKnown:
    ...
