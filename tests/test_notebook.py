"""The notebook of the docs runs, and its stored outputs are current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebook import code_cells, run_cells, stored_output

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/notebook.ipynb"


def test_the_notebook_shows_the_outputs_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    results = run_cells(NOTEBOOK)
    stored = [stored_output(cell) for cell in code_cells(json.loads(NOTEBOOK.read_text()))]
    assert len(results) > 8
    for (source, output), shown in zip(results, stored, strict=True):
        assert (output or {}).get("text/plain") == shown, (
            f"{source}\nRewrite the outputs: python -m tests.notebook docs/notebook.ipynb"
        )
