"""Watch live runs for problems, and report each once: no progress, NaN, memory, step time.

| rule       | condition                                                                       |
|------------|---------------------------------------------------------------------------------|
| `stall`    | no step ends for long, or a rank stopped or failed (`LiveState`)                |
| `nan`      | the last value of a logged number is not finite                                 |
| `memory=N%` | the allocator of a rank reserves more than N% of its device                    |
| `slow=N%`  | the typical step takes N% longer than the fastest typical step of the run so far |

Nothing here reads more than the new rows of each run (`Monitor`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from fsdp_inspect.analysis.live.feed import LiveState
from fsdp_inspect.analysis.live.monitor import MonitoredRun
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS
from fsdp_inspect.formatting import format_ns, format_ratio

STALL, NAN, MEMORY, SLOW = "stall", "nan", "memory", "slow"
RULES: Mapping[str, float | None] = {STALL: None, NAN: None, MEMORY: 0.95, SLOW: 0.5}
"""The rules with their default limits; None: a rule without a limit."""
_STOPPED = {
    LiveState.STALLED: "No step ends any more.",
    LiveState.DIED: "A rank stopped without reporting an error.",
    LiveState.FAILED: "A rank failed.",
}


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One condition with its limit."""

    name: str
    limit: float | None = None
    """A fraction; None for rules without a limit."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a rule such as `stall`, `memory=95%` or `slow=50%`.

        Raises:
            ValueError: There is no such rule, or its limit is invalid.
        """
        name, has_limit, limit = text.strip().partition("=")
        known = ", ".join(f"{each}=N%" if usual else each for each, usual in RULES.items())
        if name not in RULES or (has_limit and RULES[name] is None):
            raise ValueError(f"Invalid alert: {text!r}. Expected one of: {known}.")
        if not has_limit:
            return cls(name, RULES[name])
        try:
            value = float(limit.strip().removesuffix("%")) / 100
        except ValueError:
            value = math.nan
        if not limit.strip().endswith("%") or not 0 < value <= 100:
            raise ValueError(
                f"Invalid limit of the alert {text!r}. Expected a percentage above 0, such as "
                f"{name}=95%."
            )
        return cls(name, value)

    def __str__(self) -> str:
        """The rule as `parse` reads it."""
        return self.name if self.limit is None else f"{self.name}={100 * self.limit:g}%"


@dataclass(frozen=True, slots=True)
class Alert:
    """One problem of a run, reported once until it is over."""

    rule: str
    run_id: str
    step: int | None
    """The last step of the lowest monitored rank; None before the first one."""
    sentence: str

    @property
    def text(self) -> str:
        """The alert in one line."""
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.run_id}{step}: {self.sentence}"


@dataclass
class RunAlerts:
    """The alerts of one run, from one look at its numbers to the next."""

    rules: Sequence[AlertRule]
    _raised: set[str] = field(default_factory=set)
    """The alerts that hold, which are not reported again."""
    _fastest_ns: int | None = None

    def look(self, run: MonitoredRun) -> list[Alert]:
        """The alerts that have begun since the last look."""
        known = [rank.numbers for rank in run.ranks if rank.numbers is not None]
        step = known[0].last_step if known else None
        found = {
            key: Alert(rule.name, run.manifest.run_id, step, sentence)
            for rule in self.rules
            for key, sentence in self._check(rule, run)
        }
        new = [alert for key, alert in found.items() if key not in self._raised]
        self._raised = set(found)
        return new

    def _check(self, rule: AlertRule, run: MonitoredRun) -> Iterator[tuple[str, str]]:
        """What a rule finds: a key that stays the same while it holds, and its sentence."""
        match rule.name:
            case "stall":
                if run.state in _STOPPED:
                    yield f"stall {run.state}", _STOPPED[run.state]
            case "nan":
                yield from _find_not_finite(run)
            case "memory":
                yield from _find_full(run, rule.limit or 0)
            case "slow":
                yield from self._find_slow(run, rule.limit or 0)

    def _find_slow(self, run: MonitoredRun, limit: float) -> Iterator[tuple[str, str]]:
        numbers = run.ranks[0].numbers if run.ranks else None
        if numbers is None or numbers.num_steps < TYPICAL_STEPS:
            return
        now = numbers.step_time_ns
        self._fastest_ns = min(now, self._fastest_ns or now)
        ratio = now / max(self._fastest_ns, 1) - 1
        if ratio > limit:
            yield (
                "slow",
                f"The typical step takes {format_ns(now)}, {format_ratio(ratio)} more than the "
                f"fastest one of the run, {format_ns(self._fastest_ns)}.",
            )


def _find_not_finite(run: MonitoredRun) -> Iterator[tuple[str, str]]:
    for rank in run.ranks:
        for name, value in rank.scalars.items():
            if not math.isfinite(value):
                yield f"nan {name}", f"The logged {name} is {value} on rank {rank.rank}."
                return


def _find_full(run: MonitoredRun, limit: float) -> Iterator[tuple[str, str]]:
    known = [rank for rank in run.ranks if rank.reserved_ratio is not None]
    fullest = max(known, key=lambda rank: rank.reserved_ratio or 0, default=None)
    ratio = fullest.reserved_ratio if fullest is not None else None
    if fullest is not None and ratio is not None and ratio > limit:
        yield (
            "memory",
            f"The allocator of rank {fullest.rank} reserves {format_ratio(ratio)} of its device, "
            f"more than {format_ratio(limit)}.",
        )
