"""Compare the diagnosis of a case with the injected fault."""

from __future__ import annotations

from dataclasses import dataclass

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
    def is_false_culprit(self) -> bool:
        """Whether the diagnosis names a wrong rank with certainty."""
        named = self.outcome.found["ranks"]
        return self.is_certain and bool(named) and named != [self.outcome.case.rank]


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
        problem=_judge(found["class"], found["class"] in classes),
        ranks=_judge(found["ranks"] if wanted else "none", found["ranks"] == wanted),
        line=RIGHT if line is None else _judge(location, location.endswith(f".py:{line}")),
        step=_judge(found["step"], found["step"] == case.step),
        is_certain=found["is_certain"] and bool(found["ranks"]),
    )


def _judge(said: object, is_right: bool) -> str:
    if said in (None, "", []):
        return UNKNOWN
    return RIGHT if is_right else WRONG
