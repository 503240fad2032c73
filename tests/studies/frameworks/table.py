"""Write the matrix of docs/frameworks.md from the results of `make frameworks`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tests.studies.frameworks.entries import ENTRIES, Entry
from tests.studies.frameworks.measured import COMMANDS, Measured, Recording, read

BEGIN = "<!-- matrix: written by `make frameworks` -->"
END = "<!-- end of the matrix -->"
WAYS = {"zero_code": "unmodified script", "callback": "callback"}
HEADER = (
    "| framework | recorded | losses | collectives | run | plan check | commands | simulated step "
    "| simulated peak | advice |\n|---|---|---|---|---|---|---|---|---|---|\n"
)


def render(rows: list[Measured]) -> str:
    """The matrix and the limits, in Markdown."""
    measured = {row.name: row for row in rows}
    lines = [_line(entry, measured[entry.name], way) for entry in ENTRIES for way in WAYS]
    return (
        f"{BEGIN}\n\nMeasured with torch {version('torch').split('+')[0]} and two gloo ranks.\n\n"
        f"{HEADER}{''.join(lines)}\n{_callbacks(measured)}\n{END}"
    )


def replace(page: str, matrix: str) -> str:
    """Replace the matrix between the marks of a page."""
    before, rest = page.split(BEGIN)
    return before + matrix + rest.split(END)[1]


def read_rows(folder: Path) -> list[Measured]:
    """Read the measured rows.

    Raises:
        SystemExit: A framework was not measured; the message names it.
    """
    missing = [entry.name for entry in ENTRIES if not (folder / f"{entry.name}.json").exists()]
    if missing:
        raise SystemExit(
            f"The matrix is not written: {', '.join(missing)} not measured. Expected a row of "
            f"every framework in {folder}. Run make frameworks without ARGS."
        )
    return [read(folder / f"{entry.name}.json") for entry in ENTRIES]


def _line(entry: Entry, row: Measured, way: str) -> str:
    recording: Recording = getattr(row, way)
    versions = ", ".join(each.split("+")[0] for each in row.versions.values())
    failed = [name for name in COMMANDS if recording.commands[name]]
    cells = (
        f"{entry.title} {versions}" if way == "zero_code" else "",
        WAYS[way],
        "identical" if not recording.losses else "differ",
        f"{recording.num_collectives:,} equal" if not recording.counts else "differ",
        "complete" if not recording.recording else "incomplete",
        _plan(entry, recording),
        f"all {len(COMMANDS)} answer" if not failed else f"{', '.join(failed)} fail",
        _percent(recording.replay_error) if entry.is_simulated else "no",
        _percent(recording.memory_error) if entry.is_simulated else "no",
        _advice(entry, recording),
    )
    return f"| {' | '.join(cells)} |\n"


def _plan(entry: Entry, recording: Recording) -> str:
    if recording.plan:
        return "fails"
    return "passes" if entry.is_plan_checked else "no"


def _advice(entry: Entry, recording: Recording) -> str:
    if not entry.is_simulated:
        return "findings"
    return "refused" if recording.advice else "ranked"


def _percent(ratio: float | None) -> str:
    if ratio is None:
        return "unknown"
    return f"{ratio:+.1%}" if abs(ratio) >= 0.0005 else "0.0%"


def _callbacks(measured: dict[str, Measured]) -> str:
    rows = [f"| {entry.title} | {entry.callback} | {entry.limits} |\n" for entry in ENTRIES]
    return f"| framework | callback | limits |\n|---|---|---|\n{''.join(rows)}"
