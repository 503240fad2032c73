"""Hold the rows of the GPU script by step, read and write them, and merge those of two calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.outcome import Row, Verdict
from tests.gpu.table import read_json, render_table, table_json
from tests.studies.benchmarks.machine import Machine

FIGURES = "figures.json"
TABLE = "figures.md"
LOG = "steps.log"
REPORT = "report.txt"
_APPENDED = (LOG, REPORT)
MAX_FILE_BYTES = 15 << 20
"""The GPU machine returns files of less than 16 MiB."""


@dataclass(slots=True)
class Results:
    """The rows of one call, or of several calls on one machine."""

    machine: Machine
    rows: dict[str, list[Row]] = field(default_factory=dict)
    """By step, in the order of the table."""

    @classmethod
    def read(cls, folder: Path) -> Results | None:
        """The results in a folder; None if it has none."""
        path = folder / FIGURES
        return cls(*read_json(json.loads(path.read_text()))) if path.exists() else None

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all steps."""
        return [row for rows in self.rows.values() for row in rows]

    @property
    def table(self) -> str:
        """The table as Markdown."""
        return render_table(self.machine, self.all_rows)

    @property
    def exit_code(self) -> int:
        """0 if each row that can be measured here holds."""
        bad = Verdict.MISSED, Verdict.NOT_STARTED
        return int(any(row.verdict in bad for row in self.all_rows))

    def put(self, step: str, rows: list[Row]) -> None:
        """Replace the rows of a step, unless the step was measured before and not started now."""
        if step in self.rows and all(row.verdict is Verdict.NOT_STARTED for row in rows):
            return
        self.rows[step] = rows

    def add(self, later: Results) -> None:
        """Merge the results of a later call: its steps replace those of this call.

        Raises:
            ValueError: The calls measured different machines.
        """
        ours, theirs = ((each.gpu, each.torch) for each in (self.machine, later.machine))
        if ours != theirs:
            raise ValueError(
                f"The calls measured different machines: {' with torch '.join(ours)}, and "
                f"{' with torch '.join(theirs)}. Merge calls of one kind of machine only."
            )
        self.machine = later.machine
        for step, rows in later.rows.items():
            self.put(step, rows)

    def write(self, folder: Path) -> None:
        """Write the table as JSON and as Markdown."""
        content = table_json(self.machine, self.rows)
        (folder / FIGURES).write_text(json.dumps(content, indent=2) + "\n")
        (folder / TABLE).write_text(f"{self.table}\n")


def merge_folders(folders: Iterable[Path], target: Path) -> Results:
    """Merge the result folders of several calls into `target`, the earliest call first.

    Raises:
        ValueError: A folder has no results, or the calls measured different machines.
    """
    merged: Results | None = None
    for folder in folders:
        results = Results.read(folder)
        if results is None:
            raise ValueError(f"No {FIGURES} found in {folder}. Name result folders of this script.")
        if merged is None:
            merged = results
        else:
            merged.add(results)
        for path in sorted(folder.iterdir()):
            if path.name in _APPENDED:
                with (target / path.name).open("ab") as whole:
                    whole.write(path.read_bytes())
            elif path.name not in (FIGURES, TABLE):
                shutil.copy(path, target / path.name)
    if merged is None:
        raise ValueError("No result folder was given. Name at least one.")
    merged.write(target)
    return merged


def shorten(path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Keep the end of a log that is too large."""
    if path.exists() and path.stat().st_size > max_bytes:
        path.write_bytes(path.read_bytes()[-max_bytes // 2 :])
