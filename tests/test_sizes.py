"""Test the ratchet on the size of the code."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SIZES = runpy.run_path(str(ROOT / ".ci/sizes.py"), run_name="sizes")


@pytest.mark.parametrize(
    ("now", "grown"),
    [
        ({"modules": 3, "lines": 1001}, []),
        ({"modules": 4, "lines": 900}, ["store: 4 modules, and the limit is 3."]),
        ({"modules": 3, "lines": 1100}, ["store: 1,100 lines, and the limit is 1,000."]),
        ({"data types": 1}, ["store: 1 data types, and the limit is 0."]),
    ],
)
def test_a_size_above_its_limit_is_named(now: dict[str, int], grown: list[str]) -> None:
    limits = {"store": {"modules": 3, "lines": 1000}}

    assert SIZES["find_growth"](limits, {"store": now}) == grown


def test_data_types_are_counted_by_their_decorator_or_base() -> None:
    measured = SIZES["measure"]()

    assert measured["comparison"]["data types"] > 20
    assert measured["parallel"]["data types"] == 0
