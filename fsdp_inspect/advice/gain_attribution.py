"""Attribute each gain to one claim: a change of the plan, or one finding."""

from collections.abc import Sequence
from dataclasses import replace

from fsdp_inspect.advice.evidence import SIMULATED_PLANS, Effect, Finding
from fsdp_inspect.formatting import format_bytes, format_ns


def attribute_gains(
    findings: Sequence[Finding], *, can_play: bool, has_changes: bool
) -> tuple[Finding, ...]:
    """Remove gains that an earlier finding or a change of the plan already claims.

    If plans were simulated, findings that only name a change of the plan are left out: the
    simulation has tried it, and a suggestion names it if it helps.

    [Note: no ms twice] Exposed time is one sum. A change of the plan, a fixed straggler and a
    faster link may all shorten the same wait. So the changes of the plan claim exposed time if
    there are any, and otherwise the first finding that could save it. The other findings keep
    their numbers as costs and claim no gain.

    Args:
        findings: In their order.
        can_play: Whether the run can be simulated.
        has_changes: Whether a change of the plan is suggested.
    """
    settled: list[Finding] = []
    claimed_by = "the changes of the plan" if has_changes else ""
    for finding in leave_out_plans(findings) if can_play else findings:
        if finding.effect.is_exposed and claimed_by:
            finding = replace(finding, effect=_unclaimed(finding.effect, claimed_by))
        elif finding.effect.is_exposed:
            claimed_by = "the fix of an earlier finding"
        settled.append(_with_time(finding, can_play=can_play))
    return tuple(settled)


def leave_out_plans(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out the findings whose effect the simulation of plans decides."""
    return [finding for finding in findings if finding.effect.played_by != SIMULATED_PLANS]


def _with_time(finding: Finding, *, can_play: bool) -> Finding:
    """Add where the saved time is predicted, if plans predict it."""
    effect = finding.effect
    if not effect.played_by:
        return finding
    time = f"see {effect.played_by}." if can_play else "this run cannot be simulated."
    return replace(finding, effect=replace(effect, sentence=f"{effect.sentence} Time: {time}"))


def _unclaimed(effect: Effect, claimed_by: str) -> Effect:
    return replace(
        effect,
        sentence=f"No further saving: at most {format_ns(effect.saved_high_ns)} a step are exposed "
        f"here, and {claimed_by} may already save them.{_say_added(effect)}",
        saved_low_ns=None,
        saved_high_ns=None,
    )


def _say_added(effect: Effect) -> str:
    """A sentence on the memory that the fix adds to the peak."""
    low, high = effect.added_low_bytes, effect.added_high_bytes
    if low is None or high is None or high <= 0:
        return ""
    span = format_bytes(high) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return f" The peak rises by {span}."
