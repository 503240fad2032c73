"""Rows of the table of `make gpu`: a number, its target, and whether it is met.

There are three kinds of rows. `shown` is information. `aimed` is compared with the project's
target, except in a quick try-out, whose numbers mean nothing. `exact` is always compared. A number
that could not be measured is a row with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tests.benchmarks.figures import Figure
from tests.benchmarks.pairs import quantile


class Verdict(StrEnum):
    """What a row says of its aim."""

    SHOWN = ""
    """There is none."""
    HOLDS = "holds"
    MISSED = "MISSED"
    NOT_JUDGED = "not judged"
    """A quick try-out."""
    NOT_AVAILABLE = "not available"
    """Nothing was measured, for the reason given."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    figure: Figure
    verdict: Verdict

    def to_json(self) -> str:
        """One line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Row:
        """What `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(Figure(**fields["figure"]), Verdict(fields["verdict"]))


@dataclass(frozen=True, slots=True)
class Judge:
    """Makes rows; knows whether the numbers mean anything."""

    is_quick: bool

    def aimed(self, figure: Figure, *, holds: bool) -> Row:
        """A measured number beside what the project wants it to be."""
        if self.is_quick:
            return Row(figure, Verdict.NOT_JUDGED)
        return self.exact(figure, holds=holds)

    @staticmethod
    def exact(figure: Figure, *, holds: bool) -> Row:
        """A number that noise cannot change: judged on any machine."""
        return Row(figure, Verdict.HOLDS if holds else Verdict.MISSED)


def shown(figure: Figure) -> Row:
    """A number without an aim."""
    return Row(figure, Verdict.SHOWN)


def unavailable(name: str, reason: str) -> Row:
    """What was not measured, and why."""
    return Row(Figure(name=name, value="", how=reason), Verdict.NOT_AVAILABLE)


def failed(name: str, reason: str) -> Row:
    """A step that broke."""
    return Row(Figure(name=name, value="failed", how=reason), Verdict.MISSED)


def spread(values: Sequence[float], scale: float, unit: str) -> str:
    """Median and 90th percentile of some errors, as text."""
    middle, high = quantile(values, 0.5) * scale, quantile(values, 0.9) * scale
    return f"{middle:.1f} {unit} (p90 {high:.1f} {unit})"
