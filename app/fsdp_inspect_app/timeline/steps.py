"""Which steps of a rank can be drawn? Long runs keep the events of only some."""

import numpy as np

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunSource


def find_drawable_steps(run: RunSource, *, rank: int) -> tuple[int, ...]:
    """The finished steps whose events are here, ascending."""
    steps = run.events(rank, kinds=[EventKind.STEP]).step
    return tuple(int(step) for step in np.unique(steps))
