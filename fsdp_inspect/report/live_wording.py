"""Describe a live run in sentences.

The text is plain: each report escapes it for its format.
"""

from fsdp_inspect.analysis.live.feed import LiveState, LiveStatus
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS
from fsdp_inspect.formatting import format_ns, format_ranks


def headline_live(live: LiveStatus) -> str:
    """The state of the run in at most 12 words."""
    match live.state:
        case LiveState.STARTING:
            return "The run has started. No step has ended yet."
        case LiveState.RUNNING:
            last = live.view.steps[-1]
            return f"Step {last.step} took {format_ns(last.step_time_ns)}."
        case LiveState.STALLED:
            return f"Stalled: no step has ended for {format_ns(live.silent_ns)}."
        case LiveState.CUT_OFF:
            return f"{_culprits(live)} stopped without a recorded end."
        case LiveState.FAILED:
            return f"{_culprits(live)} failed."
        case LiveState.ENDED:
            return "The run has ended."


def describe_live(live: LiveStatus) -> str:
    """The details below the headline."""
    match live.state:
        case LiveState.STARTING:
            return _begun(live)
        case LiveState.RUNNING:
            last = live.view.steps[-1]
            ended = f"The step ended {format_ns(live.silent_ns)} ago."
            if last.exposed_ns is None:
                return f"It is a plain step: its collectives are not recorded. {ended}"
            return f"{format_ns(last.exposed_ns)} were exposed. {ended}"
        case LiveState.STALLED:
            usual = format_ns(live.view.typical_step_ns)
            return f"A step typically takes {usual}. {_after(live)}".rstrip()
        case LiveState.FAILED:
            reason = live.failure or "The reason is unknown"
            return f"{reason}. {_after(live)}".rstrip()
        case LiveState.CUT_OFF | LiveState.ENDED:
            return _after(live)


def advise_live(live: LiveStatus) -> str:
    """Describe the meaning of a problem and the next check; empty without a problem."""
    match live.state:
        case LiveState.STALLED:
            return (
                "All processes exist, but no step ends. A rank hangs in a collective or a "
                "checkpoint, or waits for data. If that goes on, Diagnosis names the rank and its "
                "line of code."
            )
        case LiveState.CUT_OFF:
            others = len(live.culprits) < len(live.ranks)
            waits = "The other ranks wait in their next collective until it times out. "
            return (
                f"{waits if others else ''}The process was killed, crashed in native code or "
                "left with os._exit, or its disk refused the recording. Open Diagnosis. Check the "
                "log of the node for the out-of-memory killer, the scheduler or a full disk."
            )
        case LiveState.FAILED:
            return "The other pages show the data up to that point."
        case _:
            return ""


def describe_pace(live: LiveStatus) -> str:
    """Describe the typical step time and its source."""
    if live.view.typical_step_ns is None:
        return "No step has ended yet."
    return (
        f"Rank {live.rank}. Typical: {format_ns(live.view.typical_step_ns)} a step, the mean over "
        f"the middle half of the last {TYPICAL_STEPS} steps without memory steps. At the start, it "
        "includes warm-up."
    )


def _begun(live: LiveStatus) -> str:
    if not live.ranks:
        return "No rank has written data."
    return f"Recorded so far: {format_ranks([row.rank for row in live.ranks])}."


def _culprits(live: LiveStatus) -> str:
    words = format_ranks(live.culprits)
    return words[:1].upper() + words[1:]


def _after(live: LiveStatus) -> str:
    if not live.view.steps:
        return ""
    return f"The last step was {live.view.steps[-1].step}."
