"""The page of the matrix says what was measured, and names what differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.torch_matrix.measure import Result, differ
from tests.torch_matrix.page import CountedTests, Version, read_tests, render
from tests.torch_matrix.setups import SETUPS


def results(**differences: list[str]) -> tuple[Result, ...]:
    return tuple(Result(name, 96, 2048, differences.get(name, [])) for name in SETUPS)


def test_a_green_version_has_only_equal_cells() -> None:
    version = Version("2.13.0", "3.11.7", results(), CountedTests(1_200, (), 3))
    page = render([version])
    assert version.is_green
    assert page.count("96, 2.00 KiB: equal, by ") == len(SETUPS)
    assert "| 2.13.0 | 3.11.7 | 1,200 | 0 | 3 |" in page
    assert "differs" not in page


def test_a_difference_and_a_failed_test_are_listed_under_their_version() -> None:
    other = Version(
        "2.99", "3.12", results(ddp=["rank 1: 3 recorded"]), CountedTests(9, ("a.test_b",), 0)
    )
    page = render([Version("2.13.0", "3.11.7", results(), CountedTests(10, (), 0)), other])
    assert not other.is_green
    assert page.endswith(
        "\n## What differs with torch 2.99\n\n- ddp: rank 1: 3 recorded\n- a.test_b failed\n"
    )
    assert "| DDP | 96, 2.00 KiB: equal, by kind | 96, **differs** |" in page


def test_counts_of_tests_come_from_the_file_of_pytest(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure/></testcase>'
        '<testcase classname="" name="a.d"><error/></testcase>'
        '<testcase classname="a" name="e"><skipped/></testcase></testsuite></testsuites>'
    )
    assert read_tests(path) == CountedTests(1, ("a.c", "a.d"), 1)


def test_messages_are_compared_by_unit_or_by_kind() -> None:
    ours = Counter({("a", "all_gather", 8): 2, ("b", "all_gather", 4): 1})
    without_sizes = Counter({("x", "all_gather", -1): 2, ("", "all_gather", 4): 1})
    assert list(differ(ours, ours, "unit")) == []
    assert list(differ(ours, without_sizes, "kind")) == []
    assert len(list(differ(ours, without_sizes, "unit"))) == 1
    assert list(differ(ours, Counter({("", "all_gather", 16): 3}), "kind")) == [
        "{('all_gather', 16): 3} profiled only"
    ]
    assert next(differ(Counter(), ours, "kind")) == "nothing was recorded"
