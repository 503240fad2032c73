"""Build tables of advice with one row for each plan."""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect.report.verification import RULINGS
from fsdp_inspect.report.wording import format_change
from fsdp_inspect.result_types import PlanAdvice, VerifiedPrediction
from fsdp_inspect_app.frames.values import mib, ms


def frame_front(plan: PlanAdvice) -> pd.DataFrame:
    """The plans that no other plan beats in both step time and peak, fastest first."""
    return pd.DataFrame(
        [
            {
                "plan": "recorded plan" if point.is_recorded else point.what,
                "predicted step (ms)": ms(point.step_ns),
                "predicted peak (MiB)": mib(point.peak_bytes),
            }
            for point in plan.front
        ]
    )


def frame_outcomes(predictions: Sequence[VerifiedPrediction]) -> pd.DataFrame:
    """Predictions and measured outcomes, newest first."""
    return pd.DataFrame([_outcome_row(each) for each in predictions])


def _outcome_row(verified: VerifiedPrediction) -> dict[str, object]:
    prediction, outcome = verified.prediction, verified.outcome
    return {
        "change": prediction.what,
        "outcome": RULINGS[outcome.ruling] if outcome else "not verified yet",
        "step predicted": format_change(prediction.change),
        "step measured": format_change(outcome.measured_change if outcome else None),
        "predicted step (ms)": ms(prediction.step_time_ns.value),
        "measured step (ms)": ms(outcome.step_time_ns if outcome else None),
        "predicted peak (MiB)": mib(prediction.peak_bytes.value if prediction.peak_bytes else None),
        "measured peak (MiB)": mib(outcome.peak_bytes if outcome else None),
        "runs": ", ".join(outcome.run_ids) if outcome else "",
        "verdict": outcome.sentence if outcome else "",
        "predicted (UTC)": prediction.created,
    }
