"""Account for the gain of a plan: the parts of the simulated step that become shorter or longer.

A simulated step is one line of time on the compute stream (CPU: the main thread). Every moment of
it belongs to one part: compute, a copy of FSDP, a wait for a collective, or the host's own work
(hooks, launches, code around the units). So the differences of the parts add up to the gain.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fsdp_inspect.advice.evidence import SIMULATED_PLANS, Effect, Finding
from fsdp_inspect.formatting import capitalize, format_bytes, format_ns
from fsdp_inspect.simulation.schedule import SimulatedStep
from fsdp_inspect.trace.codes import COLLECTIVES, COPIES, EventKind
from fsdp_inspect.trace.intervals import Intervals

HOST, SLOWDOWN = "host work", "slowdown of compute"
"""Parts besides compute, copies and the waits, which have the names of the collectives."""
_LEAST_RATIO = 0.01
"""Smaller fractions of a gain are not listed."""


def split_simulated_step(step: SimulatedStep, *, on_host: bool) -> dict[str, int]:
    """Split a simulated step into its parts; they add up to its duration.

    Args:
        step: The simulated step.
        on_host: Whether one thread runs everything but the collectives (CPU). On a device the
            all-gather's copy-in runs on its own stream, in parallel with compute.
    """
    copies = COPIES if on_host else COPIES - {EventKind.ALL_GATHER_COPY_IN}
    parts: dict[str, int] = {}
    taken = Intervals.empty()
    for name, spans in (
        ("compute", step.ran({EventKind.COMPUTE})),
        ("copies", step.ran(copies)),
        *_waits(step),
    ):
        own = spans.clip(step.start_ns, step.end_ns)
        parts[name] = own.subtract(taken).duration_ns
        taken = taken.union(own)
    parts[HOST] = step.duration_ns - sum(parts.values())
    return parts


def subtract_parts(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The gain by part, the largest first; a negative part becomes longer."""
    names = dict.fromkeys((*before, *after))
    gains = {name: before.get(name, 0) - after.get(name, 0) for name in names}
    return {name: ns for name, ns in sorted(gains.items(), key=lambda one: -one[1]) if ns}


def say_parts(saved_by_ns: Mapping[str, int]) -> str:
    """`all-gather 25.2 ms, host work 5.8 ms, copies -1.0 ms`; empty without a gain.

    Parts below 1% of the gain are added up, and shown if their sum is at least 1%.
    """
    total = sum(saved_by_ns.values())
    shown = {name: ns for name, ns in saved_by_ns.items() if abs(ns) >= _LEAST_RATIO * abs(total)}
    rest = total - sum(shown.values())
    if rest and abs(rest) >= _LEAST_RATIO * abs(total):
        shown["other"] = rest
    return ", ".join(f"{name} {_signed(ns)}" for name, ns in shown.items())


def _signed(ns: int) -> str:
    return format_ns(ns) if ns >= 0 else f"-{format_ns(-ns)}"


def _waits(step: SimulatedStep) -> Iterator[tuple[str, Intervals]]:
    for kind in sorted(COLLECTIVES):
        waited = [span for span in step.spans if span.kind is kind and span.need_ns >= 0]
        if waited:
            begins = [span.need_ns for span in waited]
            ends = [max(span.end_ns, span.need_ns) for span in waited]
            yield kind.label.replace("_", "-"), Intervals.of(begins, ends)


# --- Attribute each gain to one claim: a change of the plan, or one finding.


def attribute_gains(
    findings: Sequence[Finding],
    *,
    can_simulate: bool,
    has_changes: bool,
    keeps_late_waits: bool = False,
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
        can_simulate: Whether the run can be simulated.
        has_changes: Whether a change of the plan is suggested.
        keeps_late_waits: Whether plans are simulated with the waits for late ranks as they are, so
            that no plan claims what a fixed straggler saves.
    """
    settled: list[Finding] = []
    claimed_by = "the changes of the plan" if has_changes else ""
    for finding in leave_out_plans(findings) if can_simulate else findings:
        is_apart = keeps_late_waits and finding.rule == "R32"
        if finding.effect.is_exposed and claimed_by and not is_apart:
            effect = _unclaimed(finding.effect, claimed_by)
            if finding.limits:  # it stands before the plan, as the recommended fix
                shared = "may save the same time, so the two do not add up."
                words = f"{finding.effect.sentence} {capitalize(claimed_by)} {shared}"
                effect = replace(effect, sentence=words)
            finding = replace(finding, effect=effect)
        elif finding.effect.is_exposed and not is_apart:
            claimed_by = "the fix of an earlier finding"
        settled.append(_with_time(finding, can_simulate=can_simulate))
    return tuple(settled)


def leave_out_plans(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out the findings whose effect the simulation of plans decides."""
    return [finding for finding in findings if finding.effect.predicted_by != SIMULATED_PLANS]


def _with_time(finding: Finding, *, can_simulate: bool) -> Finding:
    """Add where the saved time is predicted, if plans predict it."""
    effect = finding.effect
    if not effect.predicted_by:
        return finding
    time = f"see {effect.predicted_by}." if can_simulate else "this run cannot be simulated."
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
