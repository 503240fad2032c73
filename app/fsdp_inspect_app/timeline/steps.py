"""Find the steps of a rank that have events, and those with memory readings.

Long runs keep the events of only some steps, and on CPU memory is read in memory steps only.
"""

import numpy as np

from fsdp_inspect.analysis.memory.summary_rows import memory_parts
from fsdp_inspect.result_types import RunSource
from fsdp_inspect.trace.codes import EventKind, StepPart


def find_drawable_steps(run: RunSource, *, rank: int) -> tuple[int, ...]:
    """The finished steps with recorded events, ascending."""
    steps = run.events(rank, kinds=[EventKind.STEP]).step
    return tuple(int(step) for step in np.unique(steps))


def find_sampled_steps(run: RunSource) -> tuple[int, ...]:
    """The steps in which any rank read its memory, ascending."""
    rows = memory_parts(run)
    return tuple(np.unique(rows.step[rows.kind == StepPart.PEAK_ALLOCATED]).tolist())
