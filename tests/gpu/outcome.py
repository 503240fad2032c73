"""Make rows of the table of `make gpu`: a number, its target, and whether it is met.

There are three kinds of rows. `shown` is information. `aimed` is compared with the project's
target, except in a quick trial, whose numbers are meaningless. `exact` is always compared. A number
that could not be measured is a row with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.pairs import quantile


class Verdict(StrEnum):
    """The result of comparing a row with its aim."""

    SHOWN = ""
    """There is no aim."""
    HOLDS = "holds"
    MISSED = "MISSED"
    NOT_JUDGED = "not judged"
    """The row comes from a quick trial."""
    NOT_AVAILABLE = "not available"
    """This machine, torch or NCCL cannot measure the number, for the stated reason."""
    NOT_STARTED = "not started"
    """No time was left in the call."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    figure: Figure
    verdict: Verdict

    def to_json(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Row:
        """Read a row that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(Figure(**fields["figure"]), Verdict(fields["verdict"]))


@dataclass(frozen=True, slots=True)
class Judge:
    """Makes rows; stores whether the numbers are meaningful."""

    is_quick: bool

    def aimed(self, figure: Figure, *, holds: bool) -> Row:
        """A row for a measured number with the project's aim."""
        if self.is_quick:
            return Row(figure, Verdict.NOT_JUDGED)
        return self.exact(figure, holds=holds)

    def within(
        self,
        name: str,
        error: float,
        aim: float,
        *,
        how: str,
        numbers: dict[str, float],
        interval: str = "",
    ) -> Row:
        """A row for a relative error that should be smaller than `aim`."""
        figure = Figure(
            name=name,
            value=f"{100 * error:+.2f} %",
            interval=interval,
            aim=f"within {100 * aim:.0f} %",
            how=how,
            numbers=numbers,
        )
        return self.aimed(figure, holds=abs(error) < aim)

    @staticmethod
    def exact(figure: Figure, *, holds: bool) -> Row:
        """A row for a number without noise, which is judged on any machine."""
        return Row(figure, Verdict.HOLDS if holds else Verdict.MISSED)


def shown(figure: Figure) -> Row:
    """A row for a number without an aim."""
    return Row(figure, Verdict.SHOWN)


def unavailable(name: str, reason: str) -> Row:
    """A row for a number that cannot be measured here; the reason continues `because`."""
    return Row(
        Figure(name=name, value="", how=f"Not available, because {reason}"), Verdict.NOT_AVAILABLE
    )


def not_started(name: str, reason: str) -> Row:
    """A row for a step that a later call has to measure."""
    return Row(Figure(name=name, value="", how=reason), Verdict.NOT_STARTED)


def failed(name: str, reason: str) -> Row:
    """A row for a step that failed."""
    return Row(Figure(name=name, value="failed", how=reason), Verdict.MISSED)


def spread(values: Sequence[float], scale: float, unit: str) -> str:
    """Median and 90th percentile of some errors, as text."""
    middle, high = quantile(values, 0.5) * scale, quantile(values, 0.9) * scale
    return f"{middle:.1f} {unit} (p90 {high:.1f} {unit})"
