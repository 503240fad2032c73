"""Tabulate the plans of advice, and draw them between step time and memory.

Nothing is computed here.
"""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.charts.lines import Line, Lines, PlaceAxis, draw_lines
from fsdp_inspect.report.palette import NEUTRAL, SHOWN
from fsdp_inspect.report.verification import name_ruling
from fsdp_inspect.report.wording import format_change
from fsdp_inspect.result_types import ParetoPoint, PlanAdvice, VerifiedPrediction
from fsdp_inspect_app.tables import mib, ms

RECORDED, PLANS, ADVISED = SHOWN, NEUTRAL.colour, SHOWN
_MARGIN = 0.05


def draw_front(plan: PlanAdvice) -> Chart | None:
    """The best plans, from the fastest to the smallest, beside the recorded one.

    The first line holds the plans in the order of `plan.front`; points without a known peak are
    left out.
    """
    points = [point for point in plan.front if point.peak_bytes is not None]
    if not points:
        return None
    peaks = [point.peak_bytes or 0 for point in points]
    fastest, limit = plan.fastest, plan.memory_limit_bytes
    lines = [
        Line(
            "best plans",
            [point.step_ns for point in points],
            peaks,
            "points",
            PLANS,
            [
                f"{point.what}: {format_ns(point.step_ns)} a step, "
                f"peak {format_bytes(point.peak_bytes)}"
                for point in points
            ],
        ),
        *(
            Line(
                name,
                [step_ns],
                [peak_bytes],
                style,
                colour,
                [f"{format_ns(step_ns)} a step, peak {format_bytes(peak_bytes)}"],
            )
            for name, step_ns, peak_bytes, colour, style in (
                (
                    "recorded plan, simulated",
                    *(plan.replayed_step_ns, plan.replayed_peak_bytes, RECORDED, "squares"),
                ),
                ("advised", fastest.step_ns, fastest.peak_bytes, ADVISED, "rings"),
            )
            if peak_bytes is not None
        ),
    ]
    times = [time for line in lines for time in line.places]
    room = _MARGIN * ((max(times) - min(times)) or max(times))
    is_near = limit is not None and limit <= 3 * max(peaks)
    return draw_lines(
        Lines(
            lines,
            MetricUnit.BYTES,
            axis=PlaceAxis(
                word="",
                unit=MetricUnit.NS,
                first=min(times) - room,
                last=max(times) + room,
                title="predicted step time",
            ),
            format_value=format_bytes,
            from_zero=False,
            level=(limit, f"limit {format_bytes(limit)}") if limit and is_near else None,
            title="predicted peak",
        )
    )


# --- Build tables of advice with one row for each plan.


def name_point(point: ParetoPoint) -> str:
    """The name of a plan in a list."""
    return "Recorded plan" if point.is_recorded else point.what


def frame_front(plan: PlanAdvice) -> pd.DataFrame:
    """The plans that no other plan beats in both step time and peak, fastest first."""
    rows = [(name_point(one), ms(one.step_ns), mib(one.peak_bytes)) for one in plan.front]
    return pd.DataFrame(rows, columns=["plan", "predicted step (ms)", "predicted peak (MiB)"])


def frame_outcomes(predictions: Sequence[VerifiedPrediction]) -> pd.DataFrame:
    """Predictions and measured outcomes, newest first."""
    return pd.DataFrame([_outcome_row(each) for each in predictions])


def _outcome_row(verified: VerifiedPrediction) -> dict[str, object]:
    prediction, outcome = verified.prediction, verified.outcome
    return {
        "change": prediction.what,
        "outcome": name_ruling(outcome.ruling, has_other_cause=outcome.has_other_cause)
        if outcome
        else "not verified yet",
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
