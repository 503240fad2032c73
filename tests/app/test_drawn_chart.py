"""Clicks from the browser are checked before they are used."""

import pytest
from fsdp_inspect_app.drawn_chart import Click, read_click


@pytest.mark.parametrize(
    ("row", "expected"), [(0, "a"), (1, "b"), (2, None), (-1, None), ("x", None)]
)
def test_a_click_picks_what_its_row_stands_for(row, expected):
    assert Click(0, row, 0).pick(["a", "b"]) == expected


def test_a_click_names_the_point_and_its_line():
    assert read_click({"column": 7, "row": 2, "curve": 1}) == Click(7, 2, 1)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(None, id="nothing was clicked"),
        pytest.param("rank 2", id="a text"),
        pytest.param({"column": 7, "row": 2, "curve": "0"}, id="a text as line"),
    ],
)
def test_what_is_no_click_is_as_if_nothing_was_clicked(told):
    assert read_click(told) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(12, 12, id="whole"),
        pytest.param(12.0, 12, id="whole as float"),
        pytest.param("12", 12, id="name of a category"),
        pytest.param(12.5, None, id="between two"),
        pytest.param(float("inf"), None, id="endless"),
        pytest.param("-1; drop", None, id="a text"),
        pytest.param("9" * 5000, None, id="a very long number"),
        pytest.param(True, None, id="a truth value"),
        pytest.param([12], None, id="a list"),
        pytest.param(None, None, id="none"),
    ],
)
def test_a_place_on_an_axis_is_a_whole_number_or_none(value, expected):
    assert Click(value, 0, 0).column() == expected
    assert Click(0, value, 0).row() == expected
