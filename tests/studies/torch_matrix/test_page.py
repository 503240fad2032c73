"""The page of the matrix says what was measured, and names what differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.studies.torch_matrix.measure import Result, differ
from tests.studies.torch_matrix.page import CountedTests, Version, read_tests, render
from tests.studies.torch_matrix.setups import SETUPS


def results(**differences: list[str]) -> tuple[Result, ...]:
    return tuple(Result(name, 96, 4096, differences.get(name, [])) for name in SETUPS)


def version(torch: str, tests: CountedTests, **differences: list[str]) -> Version:
    return Version(torch, "CPU", "3.11.7", "Linux, 2 cores", results(**differences), tests)


def test_a_green_version_has_only_equal_cells() -> None:
    green = version("2.13.0", CountedTests(1_200, (), 3))
    page = render([green])
    assert green.is_green
    assert page.count("96, 4.00 KiB: equal") == len(SETUPS)
    assert "| no root | 96, 4.00 KiB: equal | kind |" in page
    assert "| 2.13.0 | CPU | 3.11.7 | 1,200 | 0 | 3 |" in page
    assert "one machine\n(Linux, 2 cores). Nothing on this page ran on a GPU" in page
    assert "differs" not in page


def test_a_difference_and_a_failed_test_are_listed_under_their_version() -> None:
    other = version("2.99", CountedTests(9, ("a.test_b",), 0), ddp=["rank 1: 3 recorded"])
    page = render([version("2.13.0", CountedTests(10, (), 0)), other])
    assert not other.is_green
    assert page.endswith(
        "\n## What differs with torch 2.99\n\n- ddp: rank 1: 3 recorded\n- a.test_b failed\n"
    )
    assert "| DDP | 96, 4.00 KiB: equal | 96, 4.00 KiB: **differs** | kind |" in page


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
