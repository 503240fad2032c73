"""`make test-changed` finds the tests of a changed file."""

from pathlib import Path

import grimp
import pytest

from tests.changed import MOST_FILES, ROOT, find_tests

PACKAGES = ("fsdp_inspect", "app/fsdp_inspect_app", "instrumented_trainer")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*(Path(each).name for each in PACKAGES), "tests", cache_dir=None)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("fsdp_inspect/analysis/breakdown.py", "tests/analysis/test_breakdown.py"),
        ("fsdp_inspect/catalog/generations.py", "tests/catalog/test_index.py"),
        ("fsdp_inspect/pytest_plugin.py", "tests/test_pytest_plugin.py"),
        ("tests/s3_server.py", "tests/store/test_object_store.py"),
        ("tests/trace/test_plan.py", "tests/trace/test_plan.py"),
    ],
    ids=["its own", "of its importers", "of its name", "of a helper", "a test"],
)
def test_a_changed_file_has_its_tests(graph: grimp.ImportGraph, changed: str, tests: str) -> None:
    assert Path(tests) in find_tests(Path(changed), graph)


def test_a_file_outside_the_packages_has_none(graph: grimp.ImportGraph) -> None:
    assert find_tests(Path("samples/new.py"), graph) == []


def test_every_module_has_few_tests_and_most_modules_have_one(
    graph: grimp.ImportGraph,
) -> None:
    paths = [path.relative_to(ROOT) for each in PACKAGES for path in (ROOT / each).rglob("*.py")]
    counts = {path: len(find_tests(path, graph)) for path in paths}
    assert max(counts.values()) <= MOST_FILES
    assert sum(not count for count in counts.values()) < 0.15 * len(counts)


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
