"""Search for a straggler, but read events only if the step times give a reason to.

A straggler works longer than the other ranks: its step time - its exposed communication is larger
than the median over ranks. The summary shows that without events. Only then the search reads the
events of the ranks that `fsdp-inspect ranks` reads, so that both give the same result.
"""

from collections.abc import Sequence

from fsdp_inspect.analysis.overlap import RankOverlap
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.verdict import STRAGGLER_RATIO, StragglerFacts
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.run import RunSource


def may_have_straggler(ranks: Sequence[RankOverlap]) -> bool:
    """Return whether one rank's extra work is large enough to make the step longer."""
    work = [row.step_time_ns - row.exposed_ns for row in ranks]
    middle, step_time = median(work), median([row.step_time_ns for row in ranks])
    if len(work) < 2 or middle is None or not step_time:
        return False
    return max(work) - middle >= STRAGGLER_RATIO * step_time


def find_straggler(run: RunSource, ranks: Sequence[RankOverlap]) -> StragglerFacts | None:
    """Return the rank that the other ranks wait for, confirmed by a replay; None without one."""
    if not may_have_straggler(ranks):
        return None
    found = measure_ranks(run).straggler
    if found is None:
        return None
    return StragglerFacts(
        rank=found.rank,
        host=found.host,
        cost_ns=found.cost_ns,
        last_ratio=found.last_ratio,
        late_ns=found.late_ns,
        phase=found.phase,
        meanwhile=found.meanwhile,
        meanwhile_ns=found.meanwhile_ns,
    )
