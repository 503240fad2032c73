"""What does communication cost the compute that hides it?

[Note: what hiding costs] Kernels that communicate take bandwidth and cores from kernels that
compute: of every ns of a wait that a plan hides, slowdown - 1 is paid in compute (RULES R24). The
recorded compute holds what the recorded plan pays already. So a played plan is charged for what it
hides more than the recorded one, and credited with what it hides less. Only a slowdown that the run
tells clearly counts (`analysis.contention`); without one nothing is charged, and advice says so.
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.simulation.schedule import PlayedStep
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from fsdp_inspect.trace.intervals import Intervals


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long compute takes beside communication, with the spread of passes."""

    middle: float = 1.0
    low: float = 1.0
    high: float = 1.0
    reason: str = ""
    """Why it is taken to be none; empty: it is told."""

    @classmethod
    def of(cls, contention: Contention | None, *, is_emulated: bool) -> "Slowdown":
        """The slowdown that a run tells, or none and why."""
        if is_emulated:
            return cls(reason="emulated links take nothing from it")
        if contention is None or contention.slowdown is None:
            why = contention.reason if contention is not None else None
            return cls(reason=_clause(why or "No step was timed."))
        if not contention.is_clear or contention.slowdown <= 1:
            return cls(reason="single passes vary by more than the slowdown that they show")
        low, high = contention.low or 1.0, contention.high or 1.0
        return cls(contention.slowdown, max(low, 1.0), max(high, contention.slowdown))

    @property
    def is_told(self) -> bool:
        """Whether anything is charged."""
        return self.middle > 1

    def paid(self, hidden_more_ns: int) -> "Paid":
        """What it costs to hide so much more; below 0: what it gains to hide less."""
        return Paid(*(round((each - 1) * hidden_more_ns) for each in self._all))

    @property
    def _all(self) -> tuple[float, float, float]:
        return self.middle, self.low, self.high


@dataclass(frozen=True, slots=True)
class Paid:
    """Compute that a step takes more, ns; see [Note: what hiding costs]."""

    value_ns: int = 0
    low_ns: int = 0
    """By the lowest slowdown among single passes."""
    high_ns: int = 0


NOTHING_PAID = Paid()


def hidden_ns(step: PlayedStep) -> int:
    """How long communication runs beside compute in a played step."""
    compute = [span for span in step.spans if span.kind is EventKind.COMPUTE]
    communication = [span for span in step.spans if span.kind in COLLECTIVES]
    both = (
        Intervals.of(
            np.array([span.start_ns for span in spans], dtype=np.int64),
            np.array([span.end_ns for span in spans], dtype=np.int64),
        )
        for spans in (compute, communication)
    )
    computing, communicating = both
    return computing.intersect(communicating).duration_ns


def _clause(sentence: str) -> str:
    """A sentence as the end of another one."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")
