"""Who claims a millisecond: a change of the plan, or one finding, and never two of them?"""

from collections.abc import Sequence
from dataclasses import replace

from fsdp_inspect.advice.evidence import Effect, Finding
from fsdp_inspect.formatting import format_bytes, format_ns


def attribute_gains(
    findings: Sequence[Finding], *, can_play: bool, has_changes: bool
) -> tuple[Finding, ...]:
    """Findings that claim no time which something before them claims.

    [Note: no ms twice] Exposed time is one sum: a change of the plan that hides it, a straggler
    that is mended and a faster link may all shorten the same wait. So the changes of the plan claim
    it, where there are any; else the first finding that could give it back. The others keep their
    numbers as costs and claim no gain.

    Args:
        findings: In their order.
        can_play: Whether plans could be played on the run.
        has_changes: Whether any was worth a suggestion.
    """
    settled: list[Finding] = []
    claimed_by = "the changes of the plan" if has_changes else ""
    for finding in findings:
        if finding.effect.is_exposed and claimed_by:
            finding = replace(finding, effect=_unclaimed(finding.effect, claimed_by))
        elif finding.effect.is_exposed:
            claimed_by = "what is named before"
        settled.append(_with_time(finding, can_play=can_play))
    return tuple(settled)


def _with_time(finding: Finding, *, can_play: bool) -> Finding:
    """Where the time is told that mending it saves, if plans tell it."""
    effect = finding.effect
    if not effect.played_by:
        return finding
    time = f"told by {effect.played_by}." if can_play else "no plan can be played here."
    return replace(finding, effect=replace(effect, sentence=f"{effect.sentence} Time: {time}"))


def _unclaimed(effect: Effect, claimed_by: str) -> Effect:
    return replace(
        effect,
        sentence=f"No time is claimed on top: at most {format_ns(effect.saved_high_ns)} a step are "
        f"exposed here, which {claimed_by} may save already.{_say_added(effect)}",
        saved_low_ns=None,
        saved_high_ns=None,
    )


def _say_added(effect: Effect) -> str:
    """What mending it adds to the peak, as the end of a sentence's paragraph."""
    low, high = effect.added_low_bytes, effect.added_high_bytes
    if low is None or high is None or high <= 0:
        return ""
    span = format_bytes(high) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return f" The peak rises by {span}."
