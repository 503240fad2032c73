"""Run one step of the GPU script in a separate process: `python -m tests.gpu.step NAME SETTING`.

Each row is written immediately, so the rows stay if the step fails or is stopped.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from tests.gpu import suites
from tests.gpu.setting import Setting

ROWS = "rows.jsonl"


def main(name: str, text: str) -> None:
    """Run the step and write its rows to `rows.jsonl` in its folder."""
    setting = Setting.from_json(text)
    if name in suites.FILES:
        measure = suites.measure_of(name)
    else:
        measure = import_module(f"tests.gpu.{name}").measure
    with Path(setting.scratch / ROWS).open("a") as rows:
        for row in measure(setting):
            print(row.to_json(), file=rows, flush=True)
            print(f"{row.figure.name}: {row.figure.value} {row.verdict}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
