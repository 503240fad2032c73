"""Account for the gain of a plan: the parts of the simulated step that become shorter or longer.

A simulated step is one line of time on the compute stream (CPU: the main thread). Every moment of
it belongs to one part: compute, a copy of FSDP, a wait for a collective, or the host's own work
(hooks, launches, code around the units). So the differences of the parts add up to the gain.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from fsdp_inspect.formatting import format_ns
from fsdp_inspect.simulation.schedule import PlayedStep, Span
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from fsdp_inspect.trace.intervals import Intervals

COMPUTE, COPIES, HOST, SLOWDOWN = "compute", "copies", "host work", "slowdown of compute"
"""Parts besides the waits, which have the names of the collectives (`all-gather`)."""
_COPIES = frozenset({
    EventKind.ALL_GATHER_COPY_IN,
    EventKind.ALL_GATHER_COPY_OUT,
    EventKind.REDUCE_SCATTER_COPY_IN,
})  # fmt: skip
_LEAST_RATIO = 0.01
"""Smaller fractions of a gain are not listed."""


def split_step(step: PlayedStep, *, on_host: bool) -> dict[str, int]:
    """Split a simulated step into its parts; they add up to its duration.

    Args:
        step: The simulated step.
        on_host: Whether one thread runs everything but the collectives (CPU). On a device the
            all-gather's copy-in runs on a stream of its own, beside compute.
    """
    copies = _COPIES if on_host else _COPIES - {EventKind.ALL_GATHER_COPY_IN}
    parts: dict[str, int] = {}
    taken = Intervals.empty()
    for name, spans in (
        (COMPUTE, _ran(step, frozenset({EventKind.COMPUTE}))),
        (COPIES, _ran(step, copies)),
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

    Parts below 1% of the gain are added up, and shown only if their sum is not.
    """
    total = sum(saved_by_ns.values())
    shown = {name: ns for name, ns in saved_by_ns.items() if abs(ns) >= _LEAST_RATIO * abs(total)}
    rest = total - sum(shown.values())
    if rest and abs(rest) >= _LEAST_RATIO * abs(total):
        shown["other"] = rest
    return ", ".join(f"{name} {_signed(ns)}" for name, ns in shown.items())


def _signed(ns: int) -> str:
    return format_ns(ns) if ns >= 0 else f"-{format_ns(-ns)}"


def _ran(step: PlayedStep, kinds: frozenset[EventKind]) -> Intervals:
    spans = [span for span in step.spans if span.kind in kinds]
    return _intervals((span.start_ns, span.end_ns) for span in spans)


def _waits(step: PlayedStep) -> Iterator[tuple[str, Intervals]]:
    for kind in sorted(COLLECTIVES):
        waited: list[Span] = [s for s in step.spans if s.kind is kind and s.need_ns >= 0]
        if waited:
            yield (
                kind.label.replace("_", "-"),
                _intervals((span.need_ns, max(span.end_ns, span.need_ns)) for span in waited),
            )


def _intervals(bounds: Iterator[tuple[int, int]]) -> Intervals:
    pairs = np.array(list(bounds), dtype=np.int64).reshape(-1, 2)
    return Intervals.of(pairs[:, 0], pairs[:, 1])
