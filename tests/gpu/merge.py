"""Merge the results of the parts of `offline.sh`, or of two calls: `python -m tests.gpu.merge`.

    python -m tests.gpu.merge FIRST SECOND --out DIR

A folder holds results, or one folder for each part. The table has the rows of all parts; of rows
with one name, the last one measured counts. DIR gets at most 8 files, each under 16 MiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Figure
from tests.benchmarks.machine import Machine
from tests.gpu.outcome import Row, Verdict
from tests.gpu.table import render_table, table_json

MOST_FILES = 8
MOST_BYTES = 15 << 20
FIGURES = "figures.json"
LOGS = ("report.txt", "steps.log", "tests.log")


def merge(folders: Sequence[Path], out: Path) -> None:
    """Write the results of all parts in these folders into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    found = [(path, _read(path)) for path in _files(folders, FIGURES)]
    tables = [(path, content) for path, content in found if content is not None]
    if tables:
        machine, rows = _rows(tables)
        _write(out / FIGURES, json.dumps(table_json(machine, rows), indent=2) + "\n")
        _write(out / "figures.md", render_table(machine, rows) + "\n")
    for name in LOGS:
        texts = [path.read_text(errors="replace") for path in _files(folders, name)]
        if texts:
            _write(out / name, "".join(texts)[-MOST_BYTES // 2 :])
    for archive in _files(folders, "*.tar.gz"):
        is_new = archive.parent != out
        if is_new and archive.stat().st_size < MOST_BYTES and _has_room(out, archive.name):
            shutil.copyfile(archive, out / archive.name)


def _files(folders: Sequence[Path], pattern: str) -> list[Path]:
    """The files of all parts, oldest first; a folder may itself be a part."""
    paths = [
        path for folder in folders for path in (*folder.glob(pattern), *folder.glob(f"*/{pattern}"))
    ]
    return sorted(dict.fromkeys(paths), key=lambda path: path.stat().st_mtime_ns)


def _read(path: Path) -> Any:
    """The content of a table; None while a step writes it."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def _rows(tables: Iterable[tuple[Path, Any]]) -> tuple[Machine, list[Row]]:
    """The last machine, and the rows of all tables by name, in the order of first measurement."""
    machine, rows = None, dict[str, Row]()
    for _, content in tables:
        machine = Machine(**content["machine"])
        for figure in content["figures"]:
            verdict = Verdict(figure.pop("verdict") or "")
            figure["numbers"] = {
                name: float("inf") if number is None else number
                for name, number in figure["numbers"].items()
            }
            rows[figure["name"]] = Row(Figure(**figure), verdict)
    assert machine is not None
    return machine, list(rows.values())


def _has_room(out: Path, name: str) -> bool:
    return (out / name).exists() or len(list(out.iterdir())) < MOST_FILES


def _write(path: Path, text: str) -> None:
    """Replace a file at once: its reader may be interrupted."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def main() -> None:
    """Merge the folders of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.merge", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    missing = [str(folder) for folder in given.folders if not folder.is_dir()]
    if missing:
        sys.exit(f"{', '.join(missing)}: no such folder. Expected folders with results.")
    merge(given.folders, given.out)


if __name__ == "__main__":
    main()
