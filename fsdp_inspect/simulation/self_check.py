"""Judge what the self-check of a simulation allows to say.

The self-check simulates the recorded plan. Its error is simulated / measured step time - 1. Every
command and page that shows a prediction asks here.
"""

MAX_REPLAY_ERROR = 0.05
"""The largest error with which plans are ranked, and a predicted change is stated without a
caveat."""


def self_check_margin(error: float) -> float:
    """The half width of an interval around a simulated time that includes the measured one.

    Args:
        error: Simulated / measured - 1, above -1.

    Returns:
        A fraction of the simulated time: measured = simulated / (1 + error), so the two differ by
        error / (1 + error) of the simulated one.
    """
    return abs(error / (1 + error)) if error > -1 else 1.0


def caveat_of_self_check(error: float) -> str | None:
    """The sentence that every prediction needs at this error; None if the error is small."""
    if abs(error) <= MAX_REPLAY_ERROR:
        return None
    return (
        f"The simulation of the recorded plan is off by {error:+.1%}, so it does not "
        "describe this run well: the predicted change is uncertain by as much, and the interval "
        "includes this error. `fsdp-inspect advise` ranks no plans of this run."
    )
