"""Is there reason to look for a straggler, and is there one?

Looking needs the events of several ranks; the suspicion does not. A rank that the others wait for
works longer than they do: its step less its own waiting is longer than that of the rank in the
middle. Only then ranks are read: those that `fsdp-inspect ranks` reads, so that both say the same.
"""

from collections.abc import Sequence

from fsdp_inspect.analysis.overlap import RankOverlap
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.verdict import STRAGGLER_RATIO, StragglerFacts
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.run import RunSource


def may_have_straggler(ranks: Sequence[RankOverlap]) -> bool:
    """Whether one rank works so much longer than the others that a step could be shorter."""
    work = [row.step_time_ns - row.exposed_ns for row in ranks]
    middle, step_time = median(work), median([row.step_time_ns for row in ranks])
    if len(work) < 2 or middle is None or not step_time:
        return False
    return max(work) - middle >= STRAGGLER_RATIO * step_time


def find_straggler(run: RunSource, ranks: Sequence[RankOverlap]) -> StragglerFacts | None:
    """The rank that the others wait for, confirmed by a replay; None without one."""
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
