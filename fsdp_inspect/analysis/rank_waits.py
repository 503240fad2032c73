"""Collect all analyses of a rank's waits for communication in one object.

They are exposed time by owner and cause, prefetch, bandwidth and the slowdown of compute. They are
shown by `fsdp-inspect show RUN exposed` and the dashboard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_inspect.analysis.bandwidth import Bandwidth, measure_bandwidth
from fsdp_inspect.analysis.contention import Contention, measure_contention
from fsdp_inspect.analysis.exposed import OWNERS, Exposed, ExposedOwner, measure_exposed
from fsdp_inspect.analysis.last_arrivals import ArrivalsKnown, find_last_arrivals, read_transfers
from fsdp_inspect.analysis.prefetch import Prefetch, measure_prefetch
from fsdp_inspect.analysis.step_selection import inspected_rank, select_steps
from fsdp_inspect.analysis.units import find_unit
from fsdp_inspect.analysis.wait_causes import timed_collectives
from fsdp_inspect.columns import TableSpec
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class RankWaits(TableResult):
    """One rank's waits for communication, over its timed steps."""

    run_id: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    backend: str
    unit: str | None
    """The unit that limits owners, all-gathers, bandwidth and evidence; None: all units."""
    num_timed_steps: int
    left_out: str
    """The number of timed steps and the steps that are left out, as a sentence."""
    exposed: Exposed | None
    """None without a timed step, or if the import shows no collective."""
    prefetch: Prefetch | None
    bandwidth: Bandwidth | None
    contention: Contention | None
    arrivals: ArrivalsKnown | None

    TABLE: ClassVar[TableSpec] = OWNERS

    def rows(self) -> Sequence[ExposedOwner]:
        """The owners of communication, most exposed first."""
        return self.exposed.owners if self.exposed else ()


def measure_rank_waits(
    run: RunSource, *, rank: int | None = None, unit: str | None = None
) -> RankWaits:
    """Run all analyses of a rank's waits.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.
        unit: Name of a unit, to limit the results; `(root)` is the root.

    Raises:
        IncompleteRunError: The run has no data of the rank.
        MissingDataError: The run has no unit with this name.
    """
    chosen = None if unit is None else find_unit(run.manifest, unit)
    index = None if chosen is None else chosen.index
    member = inspected_rank(run, rank)
    arrivals, last_arrival_ns, transfer_ns = None, None, None
    if member is not None:
        collectives = timed_collectives(run, member)
        arrivals, last_arrival_ns = find_last_arrivals(run, member.rank, collectives)
        transfer_ns = read_transfers(run, member.rank, collectives)
    selection = select_steps(run)
    return RankWaits(
        run_id=run.manifest.run_id,
        source=run.manifest.source,
        backend=run.manifest.backend,
        unit=None if chosen is None else chosen.fqn,
        num_timed_steps=len(selection.timed),
        left_out=selection.sentence,
        exposed=measure_exposed(run, rank=rank, unit=index, last_arrival_ns=last_arrival_ns),
        prefetch=measure_prefetch(run, rank=rank, unit=index),
        bandwidth=measure_bandwidth(run, rank=rank, unit=index, transfer_ns=transfer_ns),
        contention=measure_contention(run, rank=rank, unit=index),
        arrivals=arrivals,
    )
