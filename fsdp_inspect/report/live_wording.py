"""How is a run that is being recorded put into words?

The text is plain: whoever shows it escapes it for the place where it is shown.
"""

from fsdp_inspect.analysis.live.feed import LiveState, LiveStatus
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.notes import describe_ranks


def describe_live(live: LiveStatus) -> str:
    """How the run goes, in a line."""
    match live.state:
        case LiveState.STARTING:
            return f"{_begun(live)}, and no step has ended yet."
        case LiveState.RUNNING:
            return _last_step(live)
        case LiveState.STALLED:
            return (
                f"Stalled: no step has ended for {format_ns(live.silent_ns)}, and one takes "
                f"{format_ns(live.view.typical_step_ns)}. {_after(live)}"
            )
        case LiveState.DIED:
            return f"{_culprits(live)} stopped without a word. {_after(live)}"
        case LiveState.FAILED:
            return (
                f"{_culprits(live)} failed: {live.failure or 'it did not say why'}. {_after(live)}"
            )
        case LiveState.ENDED:
            return f"The run is not being recorded any more: it is over. {_after(live)}".rstrip()


def advise_live(live: LiveStatus) -> str:
    """What its state means, and where to look; empty where all is well."""
    match live.state:
        case LiveState.STALLED:
            return (
                "Every process lives, and none ends a step: a rank hangs in a collective, in a "
                "checkpoint, or waits for data. The timeline of the last step shows what ran last; "
                "py-spy dump --pid shows where a process stands."
            )
        case LiveState.DIED:
            others = len(live.culprits) < len(live.ranks)
            waits = "The other ranks wait in their next collective until they time out. "
            return (
                f"{waits if others else ''}Whoever dies without a word was killed from outside: "
                "ask the log of the node for the out-of-memory killer, the scheduler or a lost "
                "connection."
            )
        case LiveState.FAILED:
            return "What was recorded until then is on the other pages."
        case _:
            return ""


def describe_pace(live: LiveStatus) -> str:
    """What a step typically takes, and how that was obtained."""
    if live.view.typical_step_ns is None:
        return "No step has ended yet."
    return (
        f"Rank {live.rank}. Typical: {format_ns(live.view.typical_step_ns)} a step, the mean "
        f"over the middle half of the last {TYPICAL_STEPS} steps. Memory steps are left out; at "
        "the start, warm-up is included."
    )


def _begun(live: LiveStatus) -> str:
    if not live.ranks:
        return "The run has begun, no rank has written anything"
    return f"The run has begun: {describe_ranks([one.rank for one in live.ranks])} of it recorded"


def _last_step(live: LiveStatus) -> str:
    last = live.view.steps[-1]
    return (
        f"Step {last.step} took {format_ns(last.step_time_ns)} and waited "
        f"{format_ns(last.exposed_ns)} of it for communication; it ended "
        f"{format_ns(live.silent_ns)} ago."
    )


def _culprits(live: LiveStatus) -> str:
    words = describe_ranks(live.culprits)
    return words[:1].upper() + words[1:]


def _after(live: LiveStatus) -> str:
    if not live.view.steps:
        return ""
    return f"The last step was {live.view.steps[-1].step}."
