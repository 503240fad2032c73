"""Test the ratchet on the size of the code, and the choice of tests for changed modules."""

import runpy
from pathlib import Path

import grimp
import pytest

from tests.changed import find_tests

ROOT = Path(__file__).parents[1]
SIZES = runpy.run_path(str(ROOT / ".ci/sizes.py"), run_name="sizes")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("fsdp_inspect", "tests", cache_dir=None)


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


def test_a_changed_module_has_the_tests_that_import_it(graph: grimp.ImportGraph) -> None:
    chosen = find_tests(Path("fsdp_inspect/comparison/noise.py"), graph)

    assert Path("tests/comparison/test_noise.py") in chosen


def test_a_module_with_many_tests_has_those_that_are_named_for_it(graph: grimp.ImportGraph) -> None:
    chosen = find_tests(Path("fsdp_inspect/trace/plan.py"), graph)

    assert Path("tests/trace/test_plan.py") in chosen
    assert len(chosen) < 10


def test_a_changed_test_runs_itself(graph: grimp.ImportGraph) -> None:
    path = Path("tests/trace/test_plan.py")

    assert find_tests(path, graph) == [path]
