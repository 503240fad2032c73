"""Compare the times of plain steps with those of the detailed steps, which the figures describe.

[Note: plain steps that differ] Most steps of a long run are plain, and most detailed steps are
early. If the training changes later, the figures describe the time before. Plain steps differ
clearly if their typical time (the mean over their middle half) is at least 15% from that of the
detailed steps, and at least 75% of them are on the same side of it. A few slow steps change neither
condition. Detailed steps are longer by what the detail costs. So shorter plain steps differ only if
the cost of detail, at the high end of its interval, does not explain it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.recorder_cost import FEWEST_BLOCKS
from fsdp_inspect.analysis.step_selection import usual_steps
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.statistics import compare_blocks
from fsdp_inspect.store.reduction.timed_steps import choose_typical
from fsdp_inspect.trace.run import BLOCK_OF_DETAIL, RunSource

_LEAST_DIFFERENCE = 0.15
_LEAST_BESIDE = 0.75
_FEWEST_STEPS = 20

_Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OtherPlainSteps:
    """Plain steps whose times clearly differ from those of the detailed steps."""

    sentence: str
    are_longer: bool
    plain_ns: int
    """The typical time of the plain steps."""


def measure_other_plain_steps(run: RunSource) -> OtherPlainSteps | None:
    """Compare the plain steps of the median rank with its timed steps; None: no clear difference.

    See [Note: plain steps that differ].
    """
    usual = usual_steps(run)
    if usual is None:
        return None
    member, is_plain = usual
    return find_other_plain_steps(member.steps, member.step_time_ns, is_plain)


def find_other_plain_steps(
    steps: NDArray[np.integer], times_ns: _Int64, is_plain: NDArray[np.bool_]
) -> OtherPlainSteps | None:
    """Compare the times of plain and detailed steps; None: they do not differ clearly.

    The steps are those of `usual_steps`, by step. See [Note: plain steps that differ].
    """
    plain, detailed = times_ns[is_plain], times_ns[~is_plain]
    if len(plain) < _FEWEST_STEPS or not len(detailed):
        return None
    was, now = (float(each[choose_typical(each)].mean()) for each in (detailed, plain))
    cost = compare_blocks(steps, times_ns, ~is_plain, length=BLOCK_OF_DETAIL)
    least = 0.0 if cost is None else was / (1 + max(cost.high, 0.0))
    is_longer = now >= was * (1 + _LEAST_DIFFERENCE) and (plain > was).mean() >= _LEAST_BESIDE
    is_shorter = now * (1 + _LEAST_DIFFERENCE) <= least and (plain < least).mean() >= _LEAST_BESIDE
    if not is_longer and not is_shorter:
        return None
    return OtherPlainSteps(
        f"These figures describe detailed steps of {format_ns(round(was))}, but the {len(plain)} "
        f"plain steps from step {steps[is_plain][0]} on typically take {format_ns(round(now))}.",
        bool(is_longer),
        round(now),
    )


def remove_detail_cost(
    steps: NDArray[np.integer], times_ns: _Int64, is_plain: NDArray[np.bool_]
) -> _Int64:
    """Return the times of steps without what detail costs in them, if the run shows this cost."""
    cost = compare_blocks(steps, times_ns, ~is_plain, length=BLOCK_OF_DETAIL)
    if cost is None or cost.num_blocks < FEWEST_BLOCKS or cost.low <= 0:
        return times_ns
    return np.where(is_plain, times_ns, np.rint(times_ns / (1 + cost.ratio)).astype(np.int64))
