import pytest

from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import format_cause, phrase_cause
from fsdp_inspect.metrics import METRICS
from fsdp_inspect.report.wording import causes_table
from tests.report.terminal_text import text_of


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_words_and_a_definition(cause):
    word = cause.label.replace("_", " ")
    own = {"straggler": "waiting for the last rank", "bandwidth": "transfer"}
    assert format_cause(cause.label) == own.get(word, word)
    assert phrase_cause(cause.label)
    assert f"{cause.label}_ns" in METRICS


def test_causes_are_listed_with_their_fraction_and_definition():
    lines = text_of(causes_table({"floor": 150, "late_issue": 100})).splitlines()
    assert lines[0].split() == ["cause", "exposed", "share", "definition"]
    assert lines[1].startswith(
        "floor        150 ns    60%  the rest of the exposed time of the first"
    )
    assert any(line.startswith("late issue   100 ns    40%  exposed time") for line in lines)
