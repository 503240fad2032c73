"""Compare the diagnosis of a case with the injected fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.studies.faults.running import Outcome

RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Right, wrong or unknown, for each part of a diagnosis."""

    outcome: Outcome
    problem: str
    ranks: str
    line: str
    step: str
    is_certain: bool

    @property
    def is_falsely_certain(self) -> bool:
        """Whether the diagnosis states a wrong class, or wrong ranks, with certainty."""
        return self.is_certain and WRONG in (self.problem, self.ranks)


def judge(outcome: Outcome) -> Verdict:
    """Judge one outcome."""
    case, found = outcome.case, outcome.found
    expected = case.expected
    classes = {each.value for each in expected.classes}
    wanted = [case.rank] if expected.has_culprit else []
    line = case.expected_line
    location = found["location"] or ""
    return Verdict(
        outcome=outcome,
        problem=_judge_class(found, classes),
        ranks=_judge(found["ranks"] if wanted else "none", found["ranks"] == wanted),
        line=RIGHT if line is None else _judge(location, location.endswith(f".py:{line}")),
        step=_judge(found["step"], found["step"] == case.step),
        is_certain=found["is_certain"],
    )


def _judge_class(found: dict[str, Any], classes: set[str]) -> str:
    """A healthy training has no class; a fault that is called healthy is wrong, not unknown."""
    if found["status"] == "healthy" or not classes:
        return RIGHT if found["status"] == "healthy" and not classes else WRONG
    return _judge(found["class"], found["class"] in classes)


def _judge(said: object, is_right: bool) -> str:
    if said in (None, "", []):
        return UNKNOWN
    return RIGHT if is_right else WRONG
