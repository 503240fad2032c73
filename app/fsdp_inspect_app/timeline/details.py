"""Describe one event of a timeline in one line."""

from fsdp_inspect.formatting import (
    format_bytes,
    format_bytes_per_s,
    format_cause,
    format_ns,
    format_unit,
)
from fsdp_inspect.report.wording import format_kind, format_method
from fsdp_inspect.result_types import EventFacts
from fsdp_inspect_app.wording import code, plain


def name_event(facts: EventFacts) -> str:
    """The name of an event, as Markdown: `**all-gather** layers.1`."""
    named = "" if facts.fqn is None else f" {code(format_unit(facts.fqn))}"
    return f"**{plain(format_kind(facts.kind))}**{named}"


def tell_event(facts: EventFacts) -> str:
    """Describe the important properties of an event in one line, as Markdown."""
    parts = [
        "" if facts.phase == "outside" else facts.phase,
        _tell_message(facts),
        format_ns(facts.duration_ns),
        _tell_bandwidth(facts),
        _tell_lead(facts),
        _tell_exposed(facts),
    ]
    return f"{name_event(facts)} · {plain(' · '.join(part for part in parts if part))}"


def tell_origin(facts: EventFacts) -> str:
    """Describe the time of an event, its issuer, and the method, as plain text."""
    parts = [f"{format_ns(facts.start_ns)} after the step began"]
    if facts.issued_by is not None:
        parts.append(f"issued by {format_unit(facts.issued_by)}")
    if facts.group is not None:
        parts.append(f"process group {facts.group}")
    parts.append(f"{facts.source}, {format_method(facts.method)}")
    return " · ".join(parts)


def _tell_exposed(facts: EventFacts) -> str:
    """Describe the exposed time of an event and its causes; empty if it is not a collective."""
    if facts.exposed_ns is None:
        return ""
    if facts.exposed_ns == 0:
        return "not exposed"
    causes = [
        f"{format_cause(cause)} {format_ns(spent)}" for cause, spent in facts.causes_ns.items()
    ]
    if len(causes) == 1:
        causes = [format_cause(next(iter(facts.causes_ns)))]
    return f"exposed {format_ns(facts.exposed_ns)}: {', '.join(causes)}"


def tell_wait(facts: EventFacts) -> str:
    """Describe a wait in short, as Markdown: its owner, its duration and its main cause."""
    cause = format_cause(next(iter(facts.causes_ns), ""))
    spent = plain(" · ".join(filter(None, (format_ns(facts.exposed_ns), cause))))
    return f"{name_event(facts)} {spent}"


def _tell_message(facts: EventFacts) -> str:
    if facts.bytes is None:
        return ""
    return f"{format_bytes(facts.bytes)}{f' of {facts.dtype}' if facts.dtype else ''}"


def _tell_bandwidth(facts: EventFacts) -> str:
    if facts.bus_bytes_per_s is None:
        return ""
    rate = f"{format_bytes_per_s(facts.bus_bytes_per_s)} bus"
    if facts.fit_bus_bytes_per_s is None:
        return rate
    return f"{rate} (fit {format_bytes_per_s(facts.fit_bus_bytes_per_s)})"


def _tell_lead(facts: EventFacts) -> str:
    if facts.lead_ns is None:
        return ""
    if facts.lead_ns == 0:
        return "issued when it was needed"
    side = "after" if facts.lead_ns < 0 else "before"
    return f"issued {format_ns(abs(facts.lead_ns))} {side} it was needed"
