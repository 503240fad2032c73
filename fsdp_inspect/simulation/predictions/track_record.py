"""Sum up the outcomes of earlier predictions from the prediction history.

The last outcome of a prediction counts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fsdp_inspect.formatting import format_ratio
from fsdp_inspect.simulation.predictions.records import Ledger, Outcome, Prediction, Ruling


@dataclass(frozen=True, slots=True)
class VerifiedPrediction:
    """A prediction and its outcome."""

    prediction: Prediction
    outcome: Outcome | None
    """None: the plan has not been verified yet."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts and errors of predictions."""

    num_predictions: int

    num_verified: int
    """Held or did not hold. Not significant, failed and pending predictions do not count."""
    num_held: int
    num_untold: int
    num_failed: int
    median_step_error: float | None
    """Median of |step_error| over all measured predictions; None without one."""
    median_memory_error: float | None


@dataclass(frozen=True, slots=True)
class TallyOfChange:
    """The tally of predictions that changed one setting, possibly among others."""

    change: str
    """A setting of plans; `units`: the cut of the model."""
    tally: Tally


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """The outcomes of the predictions in one history."""

    sentence: str
    """Empty without predictions."""
    tally: Tally
    by_change: tuple[TallyOfChange, ...]
    """One tally for each requested setting."""
    predictions: tuple[VerifiedPrediction, ...]
    """Newest first."""
    notes: tuple[str, ...]
    """Notes on unreadable lines of the history."""


def measure_track_record(
    ledger: Ledger, *, run_id: str | None = None, changes: Collection[str] = ()
) -> TrackRecord:
    """Sum up a prediction history.

    Args:
        ledger: The prediction history of a folder of runs.
        run_id: Only predictions from this baseline; None: all. The Advice page of the dashboard
            uses it for the outcomes of a run's suggestions.
        changes: Settings with a separate tally (`Prediction.changes`).
    """
    last = {outcome.prediction_id: outcome for outcome in ledger.outcomes}
    made = {each.prediction_id: each for each in ledger.predictions}
    found = [
        VerifiedPrediction(prediction, last.get(prediction.prediction_id))
        for prediction in made.values()
        if run_id is None or prediction.run_id == run_id
    ]
    found.sort(key=lambda each: -each.prediction.created_unix_ns)
    tally = _tally(found)
    by_change = tuple(
        TallyOfChange(change, _tally(own))
        for change in changes
        if (own := [each for each in found if change in each.prediction.changes])
    )
    return TrackRecord(
        sentence=_say(tally, by_change) if found else "",
        tally=tally,
        by_change=by_change,
        predictions=tuple(found),
        notes=ledger.notes,
    )


def _tally(found: Sequence[VerifiedPrediction]) -> Tally:
    outcomes = [each.outcome for each in found if each.outcome is not None]
    count = {ruling: sum(each.ruling is ruling for each in outcomes) for ruling in Ruling}
    return Tally(
        num_predictions=len(found),
        num_verified=count[Ruling.HELD] + count[Ruling.DID_NOT_HOLD],
        num_held=count[Ruling.HELD],
        num_untold=count[Ruling.CANNOT_BE_TOLD],
        num_failed=count[Ruling.FAILED],
        median_step_error=_middle([each.step_error for each in outcomes]),
        median_memory_error=_middle([each.memory_error for each in outcomes]),
    )


def _middle(errors: Sequence[float | None]) -> float | None:
    """The median absolute error; None without a known error."""
    sizes = sorted(abs(error) for error in errors if error is not None)
    if not sizes:
        return None
    half = len(sizes) // 2
    return sizes[half] if len(sizes) % 2 else (sizes[half - 1] + sizes[half]) / 2


def _say(tally: Tally, by_change: Sequence[TallyOfChange]) -> str:
    parts = [f"{tally.num_held} of {tally.num_verified} verified predictions held here"]
    if not tally.num_verified:
        parts = ["No prediction could be judged yet"]
    if tally.num_untold:
        more = " more" if tally.num_verified else ""
        parts.append(f"{tally.num_untold}{more} not significant")
    if tally.num_failed:
        parts.append(f"{tally.num_failed} did not run to completion")
    if tally.median_step_error is not None:
        parts.append(f"median error {format_ratio(tally.median_step_error)} of the step")
    apart = [
        f"{each.change} {each.tally.num_held} of {each.tally.num_verified}"
        for each in by_change
        if each.tally.num_verified
    ]
    return f"{'; '.join(parts)}.{' By change: ' + ', '.join(apart) + '.' if apart else ''}"
