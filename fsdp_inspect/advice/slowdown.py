"""Estimate how much communication slows the compute that hides it.

[Note: what hiding costs] Communication kernels take bandwidth and cores from compute kernels. Each
hidden ns costs (slowdown - 1) ns of compute (rule R24). The recorded compute already includes this
cost for the recorded plan. So a simulated plan is charged for hiding more than the recorded plan,
and credited for hiding less. Only a clear slowdown counts (`analysis.contention`). Without one
nothing is charged, and the advice states this assumption.
"""

from dataclasses import dataclass

from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.simulation.schedule import PlayedStep
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The factor by which compute slows next to communication, with the spread of passes."""

    middle: float = 1.0
    low: float = 1.0
    high: float = 1.0
    reason: str = ""
    """The reason why no slowdown is assumed; empty: the slowdown was measured."""

    @classmethod
    def of(cls, contention: Contention | None, *, is_emulated: bool) -> "Slowdown":
        """The measured slowdown, or none with the reason."""
        if is_emulated:
            return cls(reason="emulated links take no resources from compute")
        if contention is None or contention.slowdown is None:
            why = contention.reason if contention is not None else None
            return cls(reason=_clause(why or "No timed step exists."))
        if not contention.is_clear or contention.slowdown <= 1:
            return cls(reason="the times of single passes vary by more than the measured slowdown")
        low, high = contention.low or 1.0, contention.high or 1.0
        return cls(contention.slowdown, max(low, 1.0), max(high, contention.slowdown))

    @property
    def is_told(self) -> bool:
        """Whether a slowdown was measured, so that hiding is charged."""
        return self.middle > 1

    def paid(self, hidden_more_ns: int) -> "Paid":
        """The cost of hiding more than the recorded plan; negative: the gain of hiding less."""
        return Paid(*(round((each - 1) * hidden_more_ns) for each in self._all))

    @property
    def _all(self) -> tuple[float, float, float]:
        return self.middle, self.low, self.high


@dataclass(frozen=True, slots=True)
class Paid:
    """Additional compute of a step, ns; see [Note: what hiding costs]."""

    value_ns: int = 0
    low_ns: int = 0
    """The cost at the lowest slowdown of single passes."""
    high_ns: int = 0


NOTHING_PAID = Paid()


def hidden_ns(step: PlayedStep) -> int:
    """The time of a simulated step during which communication and compute both run."""
    return step.ran({EventKind.COMPUTE}).intersect(step.ran(COLLECTIVES)).duration_ns


def _clause(sentence: str) -> str:
    """A sentence as the last clause of another sentence."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")
