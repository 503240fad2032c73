"""Render a tuning session for a terminal: the answer, the plans, what to do next."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.advice.tuning import TunedPlan, Tuning
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.formatting import MISSING, format_bytes, format_ns, format_ratio
from fsdp_inspect.report.layout import dim, new_table, section
from fsdp_inspect.report.verification import RULINGS
from fsdp_inspect.report.wording import format_change, format_error
from fsdp_inspect.simulation.predictions.records import Ruling

_EXPLAINED = (Ruling.DID_NOT_HOLD, Ruling.NOT_COMPARABLE)


def render_tuning(tuning: Tuning, next_steps: Sequence[str]) -> RenderableType:
    """Render the result of a session, its plans, and what to do next."""
    return Group(Text(tuning.answer, style="bold"), *_parts(tuning, next_steps))


def _parts(tuning: Tuning, next_steps: Sequence[str]) -> Iterator[RenderableType]:
    if not tuning.is_whole:
        yield Text("The session is incomplete: plans without numbers have not run.", style="yellow")
    if tuning.findings:
        yield from section("Findings", *(_line(one.sentence) for one in tuning.findings))
    if tuning.plans:
        yield from section("Step time and peak, predicted and measured", _table(tuning.plans))
        yield from section("The plans", *(_line(line) for line in _plans(tuning.plans)))
    yield from section("Next", *(_line(line) for line in next_steps))
    yield ""
    yield dim(_provenance(tuning))


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
            RULINGS[plan.ruling] if plan.ruling else "not run",
        )
    return table


def _plans(plans: Sequence[TunedPlan]) -> Iterator[str]:
    for plan in plans:
        yield f"{plan.number}. {plan.what}  [{plan.plan_file}]"
        if plan.failure is not None:
            yield f"   Failed: {plan.failure}."
        if plan.verification is not None and plan.ruling in _EXPLAINED:
            yield f"   {plan.verification.answer}"


def _provenance(tuning: Tuning) -> str:
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


def _line(text: str) -> RenderableType:
    words = text.lstrip()
    return Padding(Text(words), (0, 0, 0, 2 + len(text) - len(words)))
