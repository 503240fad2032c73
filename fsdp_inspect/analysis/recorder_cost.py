"""State what the recorder cost a run, from the run's own detailed and plain steps.

It is a lower bound: a run cannot see what calls of the recorder cost in both kinds of steps, and
what they push out of the caches. Sessions from outside measured about twice as much (docs/figures).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.formatting import format_ratio, plural
from fsdp_inspect.statistics import BlockDifference, compare_blocks
from fsdp_inspect.trace.codes import EventKind, StepFlag
from fsdp_inspect.trace.run import BLOCK_OF_DETAIL, RecorderUse, RunSource


@dataclass(frozen=True, slots=True)
class RecorderCost:
    """The cost of a recording as parts of the step time; of the rank with the highest cost."""

    rank: int
    budget_ratio: float
    """What it may cost."""
    num_steps: int
    num_detailed: int
    """Completed steps whose units and collectives have rows."""
    detail: BlockDifference | None
    """Detailed against plain steps next to them; None: there are too few such pairs."""
    num_blocks: int
    """The number of these pairs, however few."""
    plain_ratio: float
    """Hooks and notes on the training thread in a plain step, timed in some of them."""
    threads_ratio: float
    """CPU time of the recorder's threads. It slows a training only where cores are short."""

    @property
    def ratio(self) -> float | None:
        """Detailed steps by their share, plus plain notes and threads; None: not known."""
        return None if self.detail is None else self._total(self.detail.ratio)

    @property
    def interval(self) -> tuple[float, float] | None:
        """`ratio` at the ends of the interval of `detail`; None: not known."""
        if self.detail is None:
            return None
        return self._total(self.detail.low), self._total(self.detail.high)

    def _total(self, detail: float) -> float:
        share = self.num_detailed / self.num_steps if self.num_steps else 0.0
        return share * detail + self.plain_ratio + self.threads_ratio

    @property
    def sentence(self) -> str | None:
        """The cost and the detailed steps; None for a short run, which has no plain steps."""
        if self.num_detailed == self.num_steps:
            return None
        steps = f"{self.num_detailed} of {plural(self.num_steps, 'step')} in detail"
        interval = self.interval
        if self.ratio is None or interval is None:
            least = self.num_steps + 2 * BLOCK_OF_DETAIL * (FEWEST_BLOCKS - self.num_blocks)
            return (
                f"Recorder: {steps}. Its cost is not known: {self.num_blocks} of the "
                f"{FEWEST_BLOCKS} required blocks of detailed steps lie between plain steps. "
                f"Record at least {max(least, self.num_steps + 1)} steps."
            )
        low, high = (format_ratio(max(each, 0.0)) for each in interval)
        is_above = interval[0] > self.budget_ratio
        above = f", above its budget of {format_ratio(self.budget_ratio)}" if is_above else ""
        blocks = plural(self.num_blocks, "block")
        return (
            f"Recorder: {format_ratio(max(self.ratio, 0.0))} of the step time ({low} to {high})"
            f"{above}, measured in {blocks} of this run; this does not show all of the cost; "
            f"{steps}."
        )


FEWEST_BLOCKS = 6
"""Of fewer pairs, no two values enclose the median in 95% of the cases (sign test)."""


def measure_recorder_cost(run: RunSource) -> RecorderCost | None:
    """Measure what the recorder cost; None for imports, emulated runs and older runs."""
    return remember(run, "recorder cost", partial(_measure, run))


def _measure(run: RunSource) -> RecorderCost | None:
    """The cost of the rank with the highest one, of the ranks with a record."""
    uses = {each.rank: each.recorder for each in run.ranks if each.recorder is not None}
    if run.manifest.source != "recorded" or not uses:
        return None
    rank = max(uses, key=lambda each: _own_ratio(uses[each]))
    return _measure_rank(run, rank, uses[rank])


def _own_ratio(use: RecorderUse) -> float:
    return (use.writer_ns + use.threads_ns) / use.wall_ns if use.wall_ns else 0.0


def _measure_rank(run: RunSource, rank: int, use: RecorderUse) -> RecorderCost:
    selection = select_steps(run)
    rows = run.summary(ranks=[rank], kinds=[EventKind.STEP])
    is_usual = (rows.flags & (StepFlag.MEMORY_STEP | StepFlag.HAS_BETWEEN)) == 0
    is_usual &= ~np.isin(rows.step, selection.warmup)
    usual = rows.where(is_usual)
    is_detailed = (usual.flags & StepFlag.PLAIN) == 0
    is_plain = (rows.flags & StepFlag.PLAIN) != 0
    plain_ns = float(np.median(usual.duration_ns)) if len(usual) else 0.0
    found = compare_blocks(usual.step, usual.duration_ns, is_detailed, length=BLOCK_OF_DETAIL)
    num_blocks = 0 if found is None else found.num_blocks
    return RecorderCost(
        rank=rank,
        budget_ratio=use.budget,
        num_steps=len(rows),
        num_detailed=len(rows) - int(is_plain.sum()),
        detail=found if num_blocks >= FEWEST_BLOCKS else None,
        num_blocks=num_blocks,
        plain_ratio=use.plain_ratio(plain_ns / 1e9),
        threads_ratio=_own_ratio(use),
    )
