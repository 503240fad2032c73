import re

import pytest
from hypothesis import given, strategies as st
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from fsdp_inspect.formatting import format_owner
from fsdp_inspect.report.layout import BAR_WIDTH, CODE, bar, new_table, section, unit_name
from tests.report.terminal_text import printed_of, text_of


def test_numbers_stand_to_the_right_and_words_to_the_left():
    table = new_table("unit", "time", "<why")
    table.add_row("a", "1 ms", "so")
    table.add_row("layers.0", "10 ms", "or so")
    assert text_of(table).splitlines()[1:] == [
        "a          1 ms  so",
        "layers.0  10 ms  or so",
    ]


def test_a_table_without_headers_has_no_line_for_them():
    table = new_table("", "", "<")
    table.add_row("a", "1", "b")
    assert text_of(table) == "a  1  b"


def test_a_bar_is_as_long_as_its_share_and_never_empty():
    assert bar(1.0).plain == "█" * BAR_WIDTH
    assert bar(0.5, "▒").plain == "▒" * (BAR_WIDTH // 2)
    assert bar(0.0001).plain == "▏"


def test_a_section_stands_apart_under_its_title():
    assert text_of(Group(*section("Title", "body"))).splitlines() == ["", "Title", "body"]


def test_units_are_named_the_root_and_what_has_none_too():
    names = [unit_name(fqn).plain for fqn in ("layers.0", "", None)]
    assert names == ["layers.0", "(root)", "(no unit)"]


@pytest.mark.parametrize(
    ("fqn", "is_fsdp", "name"),
    [
        pytest.param("layers.0", True, "layers.0", id="of a unit"),
        pytest.param("", True, "(root)", id="of the root"),
        pytest.param(None, False, "(not FSDP)", id="known not to be FSDP's"),
        pytest.param(None, None, "(no unit)", id="who issued it is not known"),
        pytest.param("all_gather 1.00 GiB", None, "all_gather 1.00 GiB", id="of an implied unit"),
    ],
)
def test_communication_is_called_not_fsdps_only_where_that_is_known(fqn, is_fsdp, name):
    assert format_owner(fqn, is_fsdp, "other") == name


WORDS = st.lists(st.text("ab/-.", min_size=1, max_size=60), min_size=1, max_size=8).map(" ".join)


@given(WORDS, WORDS, WORDS, WORDS)
def test_commands_and_code_are_printed_whole_and_no_line_ends_with_spaces(
    before: str, command: str, after: str, code: str
) -> None:
    prose = f"{before} `{command}` {after}"
    printed = printed_of(
        Group(Padding(Text(prose), (0, 0, 0, 2)), Padding(Text(code, style=CODE), (0, 0, 0, 6)))
    )
    assert f"`{command}`" in printed
    assert printed.splitlines()[-1] == f"      {code}"
    assert not re.search(" +$", printed, re.MULTILINE)
    assert "".join(printed.split()) == "".join(f"{prose}{code}".split())
