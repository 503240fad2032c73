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
    median_work, step_time = median(work), median([row.step_time_ns for row in ranks])
    if len(work) < 2 or median_work is None or not step_time:
        return False
    return max(work) - median_work >= STRAGGLER_RATIO * step_time


def find_straggler(run: RunSource, ranks: Sequence[RankOverlap]) -> StragglerFacts | None:
    """Return the rank that the other ranks wait for, as confirmed by a replay; None without one."""
    if not may_have_straggler(ranks):
        return None
    straggler = measure_ranks(run).straggler
    if straggler is None:
        return None
    return StragglerFacts(
        rank=straggler.rank,
        host=straggler.host,
        cost_ns=straggler.cost_ns,
        last_ratio=straggler.last_ratio,
        late_ns=straggler.late_ns,
        phase=straggler.phase,
        meanwhile=straggler.meanwhile,
        meanwhile_ns=straggler.meanwhile_ns,
        waits_ns=straggler.waits_ns,
    )
