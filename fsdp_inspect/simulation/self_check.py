"""Judge what the self-check of a simulation allows to say.

The self-check simulates the recorded plan. Its error is simulated / measured step time - 1. Every
command and page that shows a prediction asks here.
"""

from fsdp_inspect.errors import MissingDataError

MAX_REPLAY_ERROR = 0.05
"""The largest error with which plans are predicted and ranked."""
MAX_OTHER_RATIO = 0.1
"""The largest fraction of steps of other kinds without a caveat."""
PIPELINE_CAVEAT = (
    "The run is a pipeline. Waits for other stages stay as recorded in every prediction, although "
    "they change with the time of each stage."
)


def self_check_margin(error: float) -> float:
    """The half width of an interval around a simulated time that includes the measured one.

    Args:
        error: Simulated / measured - 1, above -1.

    Returns:
        A fraction of the simulated time: measured = simulated / (1 + error), so the two differ by
        error / (1 + error) of the simulated one.
    """
    return abs(error / (1 + error)) if error > -1 else 1.0


def expect_self_check(run_id: str, error: float) -> None:
    """Check that the simulation describes the run well enough to predict a plan.

    Raises:
        MissingDataError: The error of the self-check is too large.
    """
    if abs(error) > MAX_REPLAY_ERROR:
        raise MissingDataError(
            f"Plans of run {run_id!r} cannot be predicted: the simulation of the recorded plan "
            f"itself is off by {error:+.1%}. Expected at most {MAX_REPLAY_ERROR:.0%}. Record more "
            "steps on a quiet machine. If the error stays, the simulation does not support this "
            "loop."
        )


def caveat_of_kinds(num_steps: int, num_other_steps: int) -> str | None:
    """The sentence about steps of several kinds; None if nearly all are of one kind.

    Args:
        num_steps: The typical steps behind the prediction.
        num_other_steps: Typical steps with other passes or collectives.
    """
    total = num_steps + num_other_steps
    if num_other_steps <= MAX_OTHER_RATIO * total:
        return None
    return (
        f"{num_other_steps} of {total} typical steps run other passes or collectives. The "
        f"prediction describes the most frequent kind, {num_steps} steps. `fsdp-inspect simulate` "
        "predicts each kind."
    )
