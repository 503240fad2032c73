"""Run the tests of the changed modules: `make test-changed`.

The tests of a module are the test files that import it and that stand in the folder of its package.
If these are many, only the files that are named for the module run. If there is none, the tests of
the modules that import the module run. `make test` runs the others.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
MOST_FILES = 8
"""The most test files of one module, so that they take less than a minute."""


def find_changed(base: str) -> list[Path]:
    """The Python files that differ from a commit, and those that git does not know yet."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    listed = [subprocess.check_output(command, cwd=ROOT, text=True) for command in commands]
    return sorted(Path(name) for name in "".join(listed).split() if name.endswith(".py"))


def find_tests(path: Path, graph: grimp.ImportGraph) -> list[Path]:
    """The test files of one changed file, nearest first."""
    if path.name.startswith("test_"):
        return [path]
    module = _module_of(path)
    if module not in graph.modules:
        return []
    importers = _tests_above(module, graph)
    if (namesake := _mirror(module) / f"test_{path.stem}.py").exists():
        importers.add(namesake)
    own = [each for each in sorted(importers) if each.parent == _mirror(module)]
    named = [each for each in sorted(importers) if path.stem in each.stem]
    chosen = own if len(own) <= MOST_FILES else named
    return [each.relative_to(ROOT) for each in chosen or sorted(importers)[:MOST_FILES]]


def _tests_above(module: str, graph: grimp.ImportGraph) -> set[Path]:
    """The test files that import the module, or those of the nearest modules above it."""
    seen: set[str] = set()
    level, found = {module}, set[Path]()
    while level and not found:
        seen |= level
        above = {each for one in level for each in graph.find_modules_that_directly_import(one)}
        tests = {each for each in above if each.rpartition(".")[2].startswith("test_")}
        found = {ROOT / f"{each.replace('.', '/')}.py" for each in tests}
        level = above - seen
    return found


def _module_of(path: Path) -> str:
    words = path.with_suffix("").parts
    words = words[1:] if words[0] == "app" else words
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def _mirror(module: str) -> Path:
    """The folder of the tests of a module's package."""
    words = module.split(".")[:-1] or [module]
    head = {
        "fsdp_inspect": (),
        "tests": (),
        "fsdp_inspect_app": ("app",),
        "instrumented_trainer": ("trainer",),
    }
    return ROOT.joinpath("tests", *head[words[0]], *words[1:])


def main() -> int:
    """Run the tests of what differs from `HEAD`, or from the commit before it in a clean tree."""
    changed = find_changed("HEAD") or find_changed("HEAD~1")
    graph = grimp.build_graph(
        "fsdp_inspect", "fsdp_inspect_app", "instrumented_trainer", "tests", cache_dir=None
    )
    tests_of = {path: find_tests(path, graph) for path in changed}
    chosen = sorted({test for tests in tests_of.values() for test in tests})
    untested = [str(path) for path, tests in tests_of.items() if not tests]
    print(f"{len(changed)} changed files, {len(chosen)} test files.", *_list(untested), sep="\n")
    if not chosen:
        return 0
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *map(str, chosen), *sys.argv[1:]])


def _list(untested: list[str]) -> Iterator[str]:
    if untested:
        yield f"No test imports: {', '.join(untested)}. `make test` runs all tests."


if __name__ == "__main__":
    sys.exit(main())
