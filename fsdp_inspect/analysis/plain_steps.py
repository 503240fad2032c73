"""Compare the times of plain steps with those of the detailed steps, which the figures describe.

[Note: plain steps that differ] Most steps of a long run are plain, and most detailed steps are
early. If the training changes later, the figures describe the time before. Plain steps differ
clearly if their typical time (the mean over their middle half) is at least 15% from that of the
detailed steps, and at least 75% of them are on the same side of it. A few slow steps change neither
condition. Detailed steps are longer by what the detail costs. So shorter plain steps differ only if
the cost of detail, at the high end of its interval, does not explain it.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.recorder_cost import FEWEST_BLOCKS
from fsdp_inspect.analysis.step_selection import select_steps, timed_ranks, usual_steps
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.statistics import compare_blocks, middle_half
from fsdp_inspect.trace.run import BLOCK_OF_DETAIL, RunSource

_LEAST_DIFFERENCE = 0.15
_LEAST_BESIDE = 0.75
"""The fraction of the plain steps that are longer (or shorter) than the typical detailed step."""
_FEWEST_STEPS = 20
"""The least number of plain steps."""

_Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlainSteps:
    """Plain steps whose times differ clearly from those of the detailed steps."""

    num_steps: int
    first_step: int
    detailed_ns: int
    """The typical step time of the detailed steps."""
    plain_ns: int
    """The same of the plain steps."""

    @property
    def sentence(self) -> str:
        """What the figures describe, and what they do not."""
        return (
            f"These figures describe detailed steps of {format_ns(self.detailed_ns)}, but "
            f"the {self.num_steps} plain steps from step {self.first_step} on typically take "
            f"{format_ns(self.plain_ns)}."
        )


def find_other_plain_steps(run: RunSource) -> PlainSteps | None:
    """Return the plain steps of the median rank if their times differ clearly; else None.

    See [Note: plain steps that differ].
    """
    return remember(run, "other plain steps", partial(_find_other_plain_steps, run))


def _find_other_plain_steps(run: RunSource) -> PlainSteps | None:
    usual, member = usual_steps(run), timed_ranks(run).median
    if usual is None or member is None:
        return None
    is_plain = np.isin(usual.steps, select_steps(run).plain)
    typical_ns = member.typical(member.step_time_ns)
    return compare_plain_steps(usual.steps, usual.step_time_ns, is_plain, typical_ns)


def compare_plain_steps(
    steps: NDArray[np.integer],
    times_ns: _Int64,
    is_plain: NDArray[np.bool_],
    typical_ns: int | None = None,
) -> PlainSteps | None:
    """Return the plain steps if their times differ clearly from those of the others; else None.

    Args:
        steps: Steps without the first ones and without memory steps, ascending, shape (S,).
        times_ns: Their times, shape (S,).
        is_plain: Whether each is plain, shape (S,).
        typical_ns: The typical time of the others; default: the mean over their middle half.
    """
    plain, detailed = times_ns[is_plain], times_ns[~is_plain]
    if len(plain) < _FEWEST_STEPS or not len(detailed):
        return None
    was = _typical(detailed) if typical_ns is None else typical_ns
    now = _typical(plain)
    cost = compare_blocks(steps, times_ns, ~is_plain, length=BLOCK_OF_DETAIL)
    least = 0.0 if cost is None else was / (1 + max(cost.high, 0.0))
    is_longer = now >= was * (1 + _LEAST_DIFFERENCE) and (plain > was).mean() >= _LEAST_BESIDE
    is_shorter = now * (1 + _LEAST_DIFFERENCE) <= least and (plain < least).mean() >= _LEAST_BESIDE
    if not is_longer and not is_shorter:
        return None
    return PlainSteps(len(plain), int(steps[is_plain][0]), was, now)


def _typical(times_ns: _Int64) -> int:
    return round(float(times_ns[middle_half(times_ns)].mean()))


def remove_detail_cost(
    steps: NDArray[np.integer], times_ns: _Int64, is_plain: NDArray[np.bool_]
) -> _Int64:
    """Return step times in which a detailed step has no cost of detail, if the run shows this cost.

    Args:
        steps: The steps, ascending, shape (S,).
        times_ns: Their times, shape (S,).
        is_plain: Whether each is plain, shape (S,).
    """
    cost = compare_blocks(steps, times_ns, ~is_plain, length=BLOCK_OF_DETAIL)
    if cost is None or cost.num_blocks < FEWEST_BLOCKS or cost.low <= 0:
        return times_ns
    return np.where(is_plain, times_ns, np.rint(times_ns / (1 + cost.ratio)).astype(np.int64))
