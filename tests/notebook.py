"""Run the cells of a notebook and compare or rewrite its outputs.

    python -m tests.notebook docs/notebook.ipynb     # rewrite the outputs

A kernel is not needed: the cells are plain Python, and the value of a cell's last expression is
its output.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def run_cells(path: Path) -> list[tuple[str, dict[str, str] | None]]:
    """The source of each code cell with its output by MIME type; None for a cell without one."""
    names: dict[str, Any] = {}
    notebook = json.loads(path.read_text())
    return [
        (source, _run(source, names))
        for source in ("".join(cell["source"]) for cell in code_cells(notebook))
    ]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored_output(cell: dict[str, Any]) -> str | None:
    """The stored text output of a cell."""
    texts = ["".join(output["data"]["text/plain"]) for output in cell["outputs"]]
    return texts[0] if texts else None


def _run(source: str, names: dict[str, Any]) -> dict[str, str] | None:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    output = {"text/plain": repr(value)}
    if hasattr(value, "_repr_html_"):
        output["text/html"] = value._repr_html_()
    return output


def main(path: Path) -> None:
    """Rewrite the outputs of a notebook."""
    notebook = json.loads(path.read_text())
    results = run_cells(path)
    for number, (cell, (_, output)) in enumerate(
        zip(code_cells(notebook), results, strict=True), start=1
    ):
        cell["execution_count"] = number
        cell["outputs"] = [] if output is None else [
            {
                "data": {kind: text.splitlines(keepends=True) for kind, text in output.items()},
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        ]  # fmt: skip
    path.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
