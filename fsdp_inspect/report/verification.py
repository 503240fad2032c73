"""Render a verified prediction for a terminal: the outcome, the numbers, the units.

Names from the run are plain text, never rich markup.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.advice.tuning import TunedPlan, Tuning
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.comparison.verification.verification import Quantity, Verification, VerifiedUnit
from fsdp_inspect.formatting import (
    MISSING,
    format_bytes,
    format_change_ns,
    format_ns,
    format_ratio,
    plural,
)
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import dim, grouped, indented, new_table, section, unit_name
from fsdp_inspect.report.wording import format_change, format_error, format_method, format_metric
from fsdp_inspect.simulation.predictions.ledger import TrackRecord
from fsdp_inspect.simulation.predictions.records import Estimate, Ruling

MOST_UNITS = 8

_RULINGS = {
    Ruling.HELD: "held",
    Ruling.DID_NOT_HOLD: "did not hold",
    Ruling.CANNOT_BE_TOLD: "not significant",
    Ruling.FAILED: "failed",
    Ruling.NOT_COMPARABLE: "cannot be judged",
}


def name_ruling(ruling: Ruling, *, has_other_cause: bool) -> str:
    """The outcome as tables show it.

    Args:
        ruling: The outcome.
        has_other_cause: Whether something other than the plan may have changed the times.
    """
    untold = has_other_cause and ruling is Ruling.CANNOT_BE_TOLD
    return "cannot tell" if untold else _RULINGS[ruling]


@grouped
def render_verification(verification: Verification) -> Iterator[RenderableType]:
    """Render whether a prediction held: in a sentence, then by number, then by unit."""
    prediction = verification.prediction
    yield Text(verification.answer, style="bold")
    yield indented(f"Predicted plan: {prediction.what}.")
    for each in _differences(verification):
        yield indented(f"Difference in {_difference(each)}")
    yield from map(indented, verification.obstacles[1:])
    for caveat in verification.caveats:
        yield Text(f"caution: {caveat}", style="yellow")
    yield from section("Predicted and measured", _quantities(verification))
    if verification.units:
        title = "Exposed time of a step by unit"
        if len(verification.units) > MOST_UNITS:
            title += f" (the first {MOST_UNITS} of {len(verification.units)})"
        yield from section(title, _units(verification.units[:MOST_UNITS]))
    yield ""
    yield from map(dim, _provenance(verification))


def render_track_record(record: TrackRecord) -> Iterator[RenderableType]:
    """Render the outcomes of earlier predictions; nothing without predictions."""
    if record.sentence:
        yield from section("Earlier predictions", indented(record.sentence))
    for note in record.notes:
        yield Text(f"caution: {note}", style="yellow")


def _differences(verification: Verification) -> Iterator[tuple[str, str, str]]:
    for each in verification.plan_differences:
        where = f" of {each.where}" if each.where else ""
        yield f"{each.name}{where}", _written(each.asked), _written(each.ran)


def _difference(words: tuple[str, str, str]) -> str:
    name, asked, ran = words
    return f"{name}: predicted `{asked}`, measured `{ran}`."


def _written(value: object) -> str:
    """Format a setting as plan files do."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quantities(verification: Verification) -> Table:
    table = new_table("", "baseline", "predicted", "measured", "error")
    for each in verification.quantities:
        table.add_row(
            find_metric(each.name).label,
            format_metric(each.name, each.baseline),
            format_metric(each.name, each.predicted.value if each.predicted else None),
            format_metric(each.name, each.measured),
            format_error(each.error),
        )
        is_time = each.name.endswith("_ns")
        has_other = is_time and verification.has_other_cause
        said = name_ruling(each.ruling, has_other_cause=has_other) if each.ruling else ""
        interval = _interval(each.name, each.predicted)
        table.add_row(f"  {said}", "measured", interval, _range(each), "", style="dim")
    return table


def _interval(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{format_metric(name, estimate.low)} to {format_metric(name, estimate.high)}"


def _range(quantity: Quantity) -> str:
    if quantity.measured_low is None or quantity.measured_low == quantity.measured_high:
        return format_method(quantity.method) if quantity.measured is not None else ""
    low = format_metric(quantity.name, quantity.measured_low)
    return f"{low} to {format_metric(quantity.name, quantity.measured_high)}"


def _units(units: Sequence[VerifiedUnit]) -> Table:
    table = new_table("unit", "predicted", "measured", "difference")
    for unit in units:
        table.add_row(
            unit_name(unit.fqn),
            format_ns(unit.predicted_ns),
            format_ns(unit.measured_ns),
            MISSING
            if unit.predicted_ns is None or unit.measured_ns is None
            else format_change_ns(unit.predicted_ns, unit.measured_ns) or "=",
        )
    return table


def _provenance(verification: Verification) -> Iterator[str]:
    prediction = verification.prediction
    num_runs, num_baselines = len(verification.run_ids), len(verification.baseline_run_ids)
    yield (
        f"Predicted by `{prediction.made_by}` on {prediction.created[:16].replace('T', ' ')} UTC "
        f"from {prediction.num_steps} steps of run {prediction.run_id}. Error of its self-check: "
        f"{format_error(prediction.replay_error)}."
    )
    yield (
        f"Measured ({verification.source}): medians of {plural(num_runs, 'run')} of the plan and "
        f"{plural(num_baselines, 'run') if num_baselines else 'the run in the prediction'} of the "
        "baseline. The outcome compares the predicted and the measured change from the baseline, "
        "so effects of the machine on both runs cancel. "
        + (
            "Intervals: 95% confidence (rank test)."
            if verification.is_tested
            else "There are too few runs for a rank test. Noise is the largest of: 10% of the "
            "step, the spread between runs of one plan, and the spread of compute."
        )
    )
    yield from (f"Caution: {caveat}" for caveat in prediction.caveats)
    yield from (f"Assumed: {assumption}" for assumption in prediction.assumptions)


# --- Render a tuning session for a terminal: the answer, the plans, what to do next.

_EXPLAINED = (Ruling.DID_NOT_HOLD, Ruling.NOT_COMPARABLE)


@grouped
def render_tuning(tuning: Tuning, next_steps: Sequence[str]) -> Iterator[RenderableType]:
    """Render the result of a session, its plans, and what to do next."""
    yield Text(tuning.answer, style="bold")
    if not tuning.is_whole:
        yield Text("The session is incomplete: plans without numbers have not run.", style="yellow")
    if tuning.findings:
        yield from section("Findings", *(indented(one.sentence) for one in tuning.findings))
    if tuning.plans:
        yield from section("Step time and peak, predicted and measured", _table(tuning.plans))
        yield from section("The plans", *map(indented, _plans(tuning.plans)))
    yield from section("Next", *map(indented, next_steps))
    yield ""
    yield dim(_tuning_provenance(tuning))


def _table(plans: Sequence[TunedPlan]) -> Table:
    table = new_table("plan", "predicted", "measured", "change", "error", "peak", "error", "<")
    table.padding = (0, 1, 0, 0)
    for plan in plans:
        step = plan.verification.quantities[0] if plan.verification else None
        peak = plan.verification.quantities[2] if plan.verification else None
        estimate = plan.prediction.step_time_ns.value
        table.add_row(
            f"{plan.number}{' *' if plan.is_faster else ''}",
            f"{format_ns(estimate)} ({format_change(plan.prediction.change)})",
            format_ns(step.measured if step else None),
            format_change(plan.verification.measured_change if plan.verification else None),
            format_error(plan.verification.step_error if plan.verification else None),
            format_bytes(peak.measured if peak else None),
            format_error(peak.error if peak else None),
            name_ruling(plan.ruling, has_other_cause=plan.has_other_cause)
            if plan.ruling
            else "not run",
        )
    return table


def _plans(plans: Sequence[TunedPlan]) -> Iterator[str]:
    for plan in plans:
        yield f"{plan.number}. {plan.what}  [{plan.plan_file}]"
        if plan.failure is not None:
            yield f"   Failed: {plan.failure}."
        if plan.verification is not None and (plan.ruling in _EXPLAINED or plan.has_other_cause):
            yield f"   {plan.verification.answer}"


def _tuning_provenance(tuning: Tuning) -> str:
    same = (
        f"its slowest and fastest run differ by {format_ratio(tuning.same_error)}"
        if tuning.same_error is not None
        else MISSING
    )
    return (
        f"Baseline: {format_ns(tuning.baseline_step_ns)} a step, the median of "
        f"{len(tuning.baseline_run_ids)} runs; {same}. *: significantly faster than the baseline. "
        "Change: compared with the baseline. First error: of the change of the step time; second "
        f"error: of the peak. With fewer than {RUNS_FOR_A_TEST} runs on each side, changes below "
        "10% of the step, or below the spread between runs of one plan, are within noise. "
        f"{tuning.num_held} of {tuning.num_judged} judged predictions held."
    )
