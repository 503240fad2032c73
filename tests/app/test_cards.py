"""Test the number formats of tables."""

import pandas as pd
import pytest
from fsdp_inspect_app.cards import column_formats


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([4570.2, 12.3], "%.3g", id="thousands"),
        pytest.param([521.819, 0.25], "%.0f", id="hundreds"),
        pytest.param([46.5, 1.0], "%.1f", id="tens"),
        pytest.param([-4.85, None], "%.2f", id="ones"),
        pytest.param([0.0123], "%.3f", id="below one"),
        pytest.param([None, None], "%.3f", id="no value"),
        pytest.param([], "%.3f", id="no row"),
    ],
)
def test_the_largest_value_of_a_column_has_three_digits(values, expected):
    formats = column_formats(pd.DataFrame({"exposed (ms)": values, "unit": ["a"] * len(values)}))
    assert formats["exposed (ms)"]["type_config"]["format"] == expected
    assert "unit" not in formats


def test_small_messages_are_not_shown_as_nothing():
    formats = column_formats(pd.DataFrame({"message (MiB)": [3.01, 0.00098, 0.0]}))
    assert formats["message (MiB)"]["type_config"]["format"] == "%.3g"


def test_each_percentage_has_three_digits_and_a_count_has_all():
    frame = pd.DataFrame({"overlap (%)": [99.71, 100.0], "loss": [2.34567, None], "count": [1, 2]})
    formats = column_formats(frame)
    assert formats["overlap (%)"]["type_config"]["format"] == "%.3g"
    assert formats["loss"]["type_config"]["format"] == "%.3g"
    assert "count" not in formats
