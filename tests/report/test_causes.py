import pytest

from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.metrics import METRICS
from fsdp_inspect.report.causes import causes_table, format_cause, phrase_cause
from tests.report.terminal_text import text_of


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_words_and_a_definition(cause):
    assert format_cause(cause.label) == cause.label.replace("_", " ")
    assert phrase_cause(cause.label)
    assert f"{cause.label}_ns" in METRICS


def test_causes_are_listed_with_their_share_of_all_steps():
    text = text_of(causes_table({"floor": 150}, {"floor": 0.6, "late_issue": 0.4}))
    lines = text.splitlines()
    assert lines[0].split() == ["cause", "exposed", "all", "steps"]
    assert lines[1].startswith("floor       150 ns     60%  ")
    assert any(line.startswith("late issue      0 ns     40%  ") for line in lines)


def test_without_shares_there_is_no_column_for_them():
    assert text_of(causes_table({"floor": 150})).splitlines()[0].split() == ["cause", "exposed"]
