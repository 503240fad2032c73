"""Measure how long the first all-gather of a step waits for work that follows the optimizer.

By default, FSDP2 makes its all-gather streams wait for everything that is queued on the compute
stream when the root's forward begins, because the optimizer may still write parameters. So they
also wait for work between the optimizer and the forward (an average of the weights, metrics, a
fill), although no all-gather needs it. `set_post_optim_event` sets another event to wait for
(RULES R33). The analysis uses:

    from     the later of the optimizer's end and the all-gather's issue
    delay    the time from there to the start of its copy-in, without other communication

With an event right after the optimizer, the all-gather runs during that work, and so does the next
all-gather if the host has issued it (two outputs can be alive; the third waits for a copy-out). So
the step becomes shorter by min(delay, exposed time of these two), and by at least
min(delay, exposed time of the first).

Source: `FSDPState._root_pre_forward` and `FSDPModule.set_post_optim_event`, torch 2.13.
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.statistics import median, percentile
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

MIN_STEPS = 3
"""The number of steps after another step that a result requires."""
_KINDS = frozenset(
    {
        *COLLECTIVES,
        EventKind.STEP,
        EventKind.BETWEEN_STEPS,
        EventKind.OPTIMIZER,
        EventKind.ALL_GATHER_COPY_IN,
    }
)


@dataclass(frozen=True, slots=True)
class DelayedGather:
    """The first all-gather after one optimizer step. Times are ns from the start of its step."""

    step: int
    fqn: str
    issue_ns: int
    start_ns: int
    """Start of the all-gather's copy-in, if recorded."""
    end_ns: int
    optimizer_end_ns: int
    """End of the optimizer; negative if it ends in the previous step."""
    delay_ns: int
    exposed_ns: int
    """Exposed time of the all-gather."""
    next_exposed_ns: int
    """Exposed time of the next all-gather."""

    @property
    def least_gain_ns(self) -> int:
        """Lower bound of the time that the step loses."""
        return min(self.delay_ns, self.exposed_ns)

    @property
    def gain_ns(self) -> int:
        """Time that the step loses if the host runs ahead."""
        return min(self.delay_ns, self.exposed_ns + self.next_exposed_ns)


@dataclass(frozen=True, slots=True)
class OptimizerWait:
    """The wait of one rank's first all-gathers for work that follows the optimizer."""

    rank: int
    delay_ns: int
    """Median delay over the steps."""
    gain_ns: int
    """Median gain over the steps."""
    gain_low_ns: int
    """Tenth percentile of the lower bound of the gain, over the steps."""
    gain_high_ns: int
    """Ninetieth percentile of the gain, over the steps."""
    gathers: tuple[DelayedGather, ...]
    """One all-gather for each analysed step, longest delay first."""


def measure_optimizer_wait(run: RunSource, *, rank: int | None = None) -> OptimizerWait | None:
    """Measure how long the first all-gather of a step waits for work that follows the optimizer.

    Args:
        run: A run on a device with streams.
        rank: The rank; default: the median rank.

    Returns:
        None on CPU, where everything runs in the order of the main thread, and with fewer than
        `MIN_STEPS` pairs of an optimizer step and the next all-gather.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = timed_rank(run, rank)
    if member is None or run.manifest.device_type == "cpu":
        return None
    is_read = np.isin(member.steps, member.inspected.steps)
    is_read[1:] |= is_read[:-1]  # the all-gather is in the step after the optimizer's
    events = run.events(member.rank, steps=member.steps[is_read].tolist(), kinds=sorted(_KINDS))
    fqns = {unit.index: unit.fqn for unit in run.manifest.units}
    gathers = [gather for gather in _find_gathers(events, fqns) if gather is not None]
    if len(gathers) < MIN_STEPS:
        return None
    gains = [gather.gain_ns for gather in gathers]
    least = [gather.least_gain_ns for gather in gathers]
    delays = sorted(gather.delay_ns for gather in gathers)
    return OptimizerWait(
        rank=member.rank,
        delay_ns=delays[(len(delays) - 1) // 2],  # none if half of the steps have none
        gain_ns=median(gains) or 0,
        gain_low_ns=percentile(least, 10) or 0,
        gain_high_ns=percentile(gains, 90) or 0,
        gathers=tuple(sorted(gathers, key=lambda gather: -gather.delay_ns)),
    )


def _find_gathers(events: EventTable, fqns: dict[int, str]) -> list[DelayedGather | None]:
    """Find the first all-gather after each optimizer step."""
    updates = events.where(events.kind == EventKind.OPTIMIZER)
    updates = updates.where(np.argsort(updates.end_ns, kind="stable"))
    gathers = events.where(
        (events.kind == EventKind.ALL_GATHER)
        & (events.unit != NO_UNIT)
        & (events.phase == Phase.FORWARD)
    )
    first = np.searchsorted(gathers.start_ns, updates.end_ns)
    steps = events.where(events.kind == EventKind.STEP)
    found = []
    for position in np.unique(first[first < len(gathers)]).tolist():
        # If several optimizers of one step end one after the other, the last one counts.
        last = int(np.flatnonzero(first == position)[-1])
        is_next = 0 <= gathers.step[position] - updates.step[last] <= 1
        if is_next:
            first_two = gathers.where(np.arange(position, min(position + 2, len(gathers))))
            optimizer_end = int(updates.end_ns[last])
            low = np.searchsorted(events.start_ns, optimizer_end, side="left")
            high = np.searchsorted(events.start_ns, gathers.start_ns[position], side="right")
            between = events.between(int(low), max(int(low), int(high)))
            found.append(_follow(between, steps, first_two, optimizer_end, fqns))
    return found


def _follow(
    between: EventTable,
    steps: EventTable,
    first_two: EventTable,
    optimizer_end: int,
    fqns: dict[int, str],
) -> DelayedGather | None:
    """Describe the all-gather after an optimizer step; None if an evaluation is between them.

    Args:
        between: The events that start from the end of the optimizer to the start of the all-gather.
        steps: All STEP events of the rank.
        first_two: The all-gather, and the next one if there is any.
        optimizer_end: The end of the optimizer step.
        fqns: The names of the units by index.
    """
    gather, behind = first_two.where(np.array([0])), first_two.where(np.arange(1, len(first_two)))
    behind = behind.where(behind.step == gather.step[0])
    step, unit = int(gather.step[0]), int(gather.unit[0])
    if np.any(between.phase == Phase.EVALUATION):
        return None
    copies = between.where((between.kind == EventKind.ALL_GATHER_COPY_IN) & (between.unit == unit))
    begin = int(min(copies.start_ns.min(initial=gather.start_ns[0]), gather.start_ns[0]))
    issue = int(min(copies.issue_ns.min(initial=gather.issue_ns[0]), gather.issue_ns[0]))
    since = max(optimizer_end, issue)
    others = between.where(np.isin(between.kind, list(COLLECTIVES)))
    others = others.where(others.start_ns < gather.start_ns[0])
    busy = Intervals.of(others.start_ns, others.end_ns).clip(since, max(begin, since))
    origin = int(steps.start_ns[steps.step == step].min(initial=begin))
    return DelayedGather(
        step=step,
        fqn=fqns.get(unit, ""),
        issue_ns=issue - origin,
        start_ns=begin - origin,
        end_ns=int(gather.end_ns[0]) - origin,
        optimizer_end_ns=optimizer_end - origin,
        delay_ns=max(begin - since, 0) - busy.duration_ns,
        exposed_ns=_waited_ns(gather),
        next_exposed_ns=_waited_ns(behind),
    )


def _waited_ns(gather: EventTable) -> int:
    """Return the time from the later of need and start to the end; 0 without an all-gather."""
    if len(gather) == 0:
        return 0
    need, start, end = (
        int(column[0]) for column in (gather.need_ns, gather.start_ns, gather.end_ns)
    )
    return max(end - max(start, need), 0) if need != MISSING_INT else end - start
