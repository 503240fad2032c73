"""Search for a straggler or a slow group, but read events only if step times give a reason to.

A straggler works longer than the other ranks: its step time - its exposed communication is larger
than the median over ranks. So do the ranks of a slow group. The summary shows that without events.
Only then the search reads the events of the ranks that `fsdp-inspect ranks` reads, so that both
give the same result.
"""

from collections.abc import Sequence

from fsdp_inspect.analysis.overlap import RankOverlap
from fsdp_inspect.analysis.stragglers.ranks import Straggler, measure_ranks
from fsdp_inspect.analysis.verdict import STRAGGLER_RATIO, SlowGroup, StragglerFacts
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.run import RunSource


def may_have_late_ranks(ranks: Sequence[RankOverlap]) -> bool:
    """Return whether the extra work of some rank is large enough to make the step longer."""
    work = [row.step_time_ns - row.exposed_ns for row in ranks]
    median_work, step_time = median(work), median([row.step_time_ns for row in ranks])
    if len(work) < 2 or median_work is None or not step_time:
        return False
    return max(work) - median_work >= STRAGGLER_RATIO * step_time


def find_late_ranks(
    run: RunSource, ranks: Sequence[RankOverlap]
) -> StragglerFacts | SlowGroup | None:
    """Return the rank or the group that the other ranks wait for; None without one."""
    if not may_have_late_ranks(ranks):
        return None
    found = measure_ranks(run)
    if found.slow_group is not None:
        return found.slow_group
    return _straggler(found.straggler) if found.straggler is not None else None


def _straggler(straggler: Straggler) -> StragglerFacts:
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
