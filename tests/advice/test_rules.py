"""The table of rules, and the code that applies them."""

import re
from pathlib import Path

import fsdp_inspect
from fsdp_inspect.advice.rules import RULES, title_of

LIBRARY = Path(fsdp_inspect.__file__).parent
PLACES = {
    "finding": (
        "advice/findings.py", "advice/setting_findings.py", "advice/trace_findings.py",
        "analysis/plan_check/unit_waste.py",
    ),
    "change": ("advice/plan_space.py", "advice/suggestions.py"),
    "check": ("analysis/plan_check/check.py", "analysis/plan_check/unit_waste.py"),
}  # fmt: skip
"""The files that apply the rules of each kind."""


def named_in(*files: str) -> set[str]:
    return {
        rule for file in files for rule in re.findall(r'"(R\d+)"', (LIBRARY / file).read_text())
    }


def test_all_rules_are_there_in_their_order():
    assert list(RULES) == [f"R{number}" for number in range(1, 39)]


def test_every_rule_comes_up_where_the_table_says():
    for kind, files in PLACES.items():
        said = {rule for rule in RULES if kind in RULES[rule].comes}
        missing = said - named_in(*files)
        assert not missing, kind


def test_no_file_brings_up_a_rule_that_the_table_does_not_say():
    for rule in named_in(*(file for files in PLACES.values() for file in files)):
        assert set(RULES[rule].comes) - {"always"}, rule


def test_a_rule_that_is_never_said_by_itself_is_part_of_every_number():
    assert [rule for rule in RULES if RULES[rule].comes == ("always",)] == ["R24", "R34"]


def test_a_rule_that_does_not_exist_has_no_title():
    assert title_of("R99") == ""
    assert title_of("R9") == "prefetch one unit ahead in forward"
