"""Read the alerts that a user asks for: the rules, and where to send them.

| rule       | condition                                                                       |
|------------|---------------------------------------------------------------------------------|
| `stall`    | no step ends for long, or a rank stopped or failed                              |
| `nan`      | the last value of a logged number is not finite                                 |
| `memory=N%` | the allocator of a rank reserves more than N% of its device                    |
| `slow=N%`  | the typical step takes N% longer than the fastest typical step of the run so far |

`analysis.live.alerts` tests the conditions, `alert_watch` sends the alerts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

ALERTS_VARIABLE = "FSDP_INSPECT_ALERTS"
"""Passes an `AlertTarget` to a process: other users can read a command line."""
ALERT_HELP = "as JSON to a webhook, or to the standard input of a command."
ALERT_IF_HELP = (
    "An alert: stall, nan, memory=95% (of the device), slow=50% (longer steps). Repeat it for "
    "several. Default: all four."
)
STALL, NAN, MEMORY, SLOW = "stall", "nan", "memory", "slow"
RULES: Mapping[str, float | None] = {STALL: None, NAN: None, MEMORY: 0.95, SLOW: 0.5}
"""The rules with their default limits; None: a rule without a limit."""


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
class AlertTarget:
    """Where to send alerts, and which."""

    target: str
    """The URL of a webhook, or a command."""
    rules: tuple[AlertRule, ...]

    @classmethod
    def read(cls, target: str | None, rules: Sequence[str]) -> Self | None:
        """Read the values of `--alert` and `--alert-if`; None without both.

        Raises:
            ValueError: A rule is invalid, or there is no target.
        """
        if target is None and not rules:
            return None
        if not target:
            raise ValueError(
                "No target of alerts is given. Expected the URL of a webhook, or a command. Add "
                "--alert URL."
            )
        return cls(target, tuple(AlertRule.parse(rule) for rule in rules or RULES))

    def encode(self) -> str:
        """The value of `ALERTS_VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what `encode` wrote."""
        found = json.loads(text)
        return cls(found["target"], tuple(AlertRule(**rule) for rule in found["rules"]))
