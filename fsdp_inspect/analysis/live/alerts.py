"""Watch live runs for problems, and report each once: the rules are those of `alert_rules`.

Nothing here reads more than the new rows of each run (`Monitor`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_inspect.alert_rules import MEMORY, NAN, SLOW, STALL, AlertRule
from fsdp_inspect.analysis.live.feed import LiveState
from fsdp_inspect.analysis.live.monitor import MonitoredRun
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS
from fsdp_inspect.formatting import format_ns, format_ratio

_STOPPED = {
    LiveState.STALLED: "No step ends any more.",
    LiveState.CUT_OFF: "A rank stopped without a recorded end.",
    LiveState.FAILED: "A rank failed.",
}

_Found = tuple[str, str, int | None]
"""What a rule finds: a key that stays the same while it holds (empty: one for each rule), a
sentence, and the step (None: the last one)."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One problem of a run, reported once until it is over."""

    rule: str
    run_id: str
    step: int | None
    """The step of the logged value; for other rules the last step of the lowest monitored rank,
    None before the first one."""
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
    _raised: set[tuple[str, str]] = field(default_factory=set)
    """The rules and keys of the alerts that hold, which are not reported again."""
    _fastest_ns: int | None = None

    def look(self, run: MonitoredRun) -> list[Alert]:
        """The alerts that have begun since the last look."""
        last = next((each.last_step for each in run.ranks if each.last_step is not None), None)
        found = {
            (str(rule), key): Alert(
                rule.name, run.manifest.run_id, last if step is None else step, sentence
            )
            for rule in self.rules
            for key, sentence, step in self._check(rule, run)
        }
        new = [alert for key, alert in found.items() if key not in self._raised]
        self._raised = set(found)
        return new

    def _check(self, rule: AlertRule, run: MonitoredRun) -> Iterator[_Found]:
        if rule.name == STALL and run.state in _STOPPED:
            yield run.state, _STOPPED[run.state], None
        elif rule.name == NAN:
            yield from _find_not_finite(run)
        elif rule.name == MEMORY:
            yield from _find_full(run, rule.limit or 0)
        elif rule.name == SLOW:
            yield from self._find_slow(run, rule.limit or 0)

    def _find_slow(self, run: MonitoredRun, limit: float) -> Iterator[_Found]:
        numbers = run.ranks[0].numbers if run.ranks else None
        if numbers is None or numbers.num_steps < TYPICAL_STEPS:
            return
        now = numbers.step_time_ns
        self._fastest_ns = min(now, self._fastest_ns or now)
        ratio = now / max(self._fastest_ns, 1) - 1
        if ratio > limit:
            yield (
                "",
                f"The typical step takes {format_ns(now)}, {format_ratio(ratio)} more than the "
                f"fastest one of the run, {format_ns(self._fastest_ns)}. The limit is "
                f"{format_ratio(limit)}.",
                None,
            )


def _find_not_finite(run: MonitoredRun) -> Iterator[_Found]:
    for rank in run.ranks:
        for name, logged in rank.scalars.items():
            if not math.isfinite(logged.value):
                sentence = f"The logged {name} is {logged.value} on rank {rank.rank}."
                yield name, sentence, logged.step
                return


def _find_full(run: MonitoredRun, limit: float) -> Iterator[_Found]:
    known = [rank for rank in run.ranks if rank.reserved_ratio is not None]
    fullest = max(known, key=lambda rank: rank.reserved_ratio or 0, default=None)
    ratio = fullest.reserved_ratio if fullest is not None else None
    if fullest is not None and ratio is not None and ratio > limit:
        yield (
            "",
            f"The allocator of rank {fullest.rank} reserves {format_ratio(ratio)} of its device, "
            f"more than {format_ratio(limit)}.",
            None,
        )
