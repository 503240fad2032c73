"""One public name has one meaning, and each module states its purpose."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fsdp_inspect"
SAME_MEANING = {"FsdpInspectCallback", "diagnose", "main", "open_run", "record"}
"""The callback of each framework, programs, and a command with the name of its function."""
FOLDERS = ("fsdp_inspect", "app", "instrumented_trainer", "tests", "docs")
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_two_modules_define_the_same_public_name() -> None:
    modules = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                modules[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert len(modules) > 1000
    repeated = {name: found for name, found in modules.items() if len(found) > 1}
    assert {name: found for name, found in repeated.items() if name not in SAME_MEANING} == {}


def test_no_module_opens_with_a_question() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = {path: ast.get_docstring(ast.parse(path.read_text())) for path in paths}
    assert [path for path in TREES if not texts[path]] == []
    assert [path for path, text in texts.items() if text and "?" in text.splitlines()[0]] == []
