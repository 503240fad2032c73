"""Build tables of all runs, and of the facts about one run."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fsdp_inspect.analysis.run_list import change_ratio
from fsdp_inspect.comparison.settings import describe_plan
from fsdp_inspect.result_types import RunEntry, RunManifest, Summary
from fsdp_inspect.trace.run import MISSING_READING
from fsdp_inspect_app.catalog_reading import KnownRuns, RunRow
from fsdp_inspect_app.tables import mib, ms, percent
from fsdp_inspect_app.user_store import RunNote
from fsdp_inspect_app.wording import READING, UNREADABLE

NAME_COLUMN, FOLDER_COLUMN = "run", "folder"
BASELINE_MARK, PIN_MARK, STAR_MARK = "baseline", "pinned", "starred"
MISTAKE_COLUMN, PLAIN_COLUMN = "mistake", "plain steps (ms)"
_BASELINE_SUFFIX = "vs baseline (%)"
STEP_TIMES_COLUMN, DATE_COLUMN = "step times", "recorded (UTC)"
_LONG_LIST = 1_000
"""Rows of a list that is sent with fewer details."""
_FEW_POINTS = 16
"""Points of a line in a long list."""
_REPEATED = ("status", "model", "plan", "source", "tags")
"""Columns of texts that many runs share."""
_IN_MENU = ("overlap (%)", "plan", "steps", "parameters", "source", "tags", FOLDER_COLUMN)
"""Columns that the menu of the table shows: all columns are wider than a page."""
_BESIDE_MISTAKES = ("ranks", "model")
"""Those that it also shows if a run has a mistake, whose sentence needs their space."""
_COMPARED = {
    "step time": "step_time_ns",
    "exposed": "exposed_ns",
    "peak": "peak_allocated_bytes",
}
_DEFINITIONS = {
    "step time (ms)": "Typical step of the median rank; measured, unless the source says otherwise",
    PLAIN_COLUMN: "Typical plain step, where it differs clearly; other times are of detailed steps",
    "exposed (ms)": "Exposed communication of the typical step of the median rank",
    "peak (MiB)": "Allocated memory, of the rank with the highest peak",
    f"step time {_BASELINE_SUFFIX}": "Changes below 10% may be process noise; Compare tests them",
    MISTAKE_COLUMN: "First mistake of the training; page Diagnosis says what to change",
    FOLDER_COLUMN: "Path of the run below the folder of runs",
}


def frame_runs(
    entries: Sequence[RunEntry],
    found: KnownRuns,
    notes: Mapping[str, RunNote],
    names: Mapping[str, str],
    baseline: str | None = None,
    pinned: Collection[str] = (),
) -> pd.DataFrame:
    """The list of runs, one row for each; runs that are not read yet have a name and a time only.

    Args:
        entries: The runs, in the order of the rows.
        found: The known facts about the runs.
        notes: All notes and stars by the id that the recorder gave the run.
        names: The names of the runs by id.
        baseline: The id of the baseline. With it, the changes of the other runs are columns.
        pinned: The ids of marked runs.
    """
    starred = [entry.id for entry in entries if is_starred(entry, notes)]
    marks = {**dict.fromkeys(starred, STAR_MARK), **dict.fromkeys(pinned, PIN_MARK)}
    marks |= {baseline: BASELINE_MARK} if baseline else {}
    reference = found.rows.get(baseline or "")
    rows = [
        {
            NAME_COLUMN: names.get(entry.id, entry.id),
            "mark": marks.get(entry.id, ""),
            "note": notes.get(entry.run_id, RunNote()).text,
            **_run_row(entry, found, reference),
        }
        for entry in entries
    ]
    # Use the columns of a known run, also if the first rows are unknown runs.
    columns: list[str] = max((list(row) for row in rows), key=len, default=[])
    frame = pd.DataFrame(rows, columns=columns)
    rare = ("mark", "note", MISTAKE_COLUMN, PLAIN_COLUMN)
    unused = [name for name in rare if not frame.get(name, pd.Series()).any()]
    frame = frame.drop(columns=unused, errors="ignore")
    if len(frame) > _LONG_LIST:
        frame = _shrink(frame)
    frame.attrs["definitions"] = {
        name: words for name, words in _DEFINITIONS.items() if name in frame
    }
    in_menu = (*_IN_MENU, *(_BESIDE_MISTAKES if MISTAKE_COLUMN in frame else ()))
    frame.attrs["order"] = [name for name in frame.columns if name not in in_menu]
    return frame


def _shrink(frame: pd.DataFrame) -> pd.DataFrame:
    """Shorten the lines, and send each text once, because the browser gets every row."""
    shorter = {name: frame[name].astype("category") for name in _REPEATED if name in frame}
    if STEP_TIMES_COLUMN in frame:
        shorter[STEP_TIMES_COLUMN] = frame[STEP_TIMES_COLUMN].map(_shorten, na_action="ignore")
    return frame.assign(**shorter)


def _shorten(values: Sequence[float]) -> NDArray[np.float32]:
    every = -(-len(values) // _FEW_POINTS)
    return np.array(values[::every], dtype=np.float32)


def _run_row(entry: RunEntry, found: KnownRuns, reference: RunRow | None) -> dict[str, Any]:
    row = found.rows.get(entry.id)
    recorded = pd.Timestamp(entry.created_unix_ns) if entry.created_unix_ns else pd.NaT
    if row is None:
        status = UNREADABLE if entry.id in found.problems else READING
        return {"status": status, DATE_COLUMN: recorded, FOLDER_COLUMN: entry.id}
    changes = {} if reference is None else _change_columns(row, reference)
    return {
        "status": row["status"],
        MISTAKE_COLUMN: row["training"] or "",
        "step time (ms)": ms(row["step_time_ns"]),
        PLAIN_COLUMN: ms(row["plain_step_time_ns"]),
        "exposed (ms)": ms(row["exposed_ns"]),
        "peak (MiB)": mib(row["peak_allocated_bytes"]),
        **changes,
        STEP_TIMES_COLUMN: [ms(value) for value in row["step_times_ns"] or ()] or None,
        "overlap (%)": percent(row["overlap_ratio"]),
        DATE_COLUMN: recorded,
        "ranks": row["world_size"],
        "model": row["model"],
        "plan": row["plan"],
        "steps": row["num_steps"],
        "parameters": row["num_parameters"],
        "source": row["source"],
        "tags": ", ".join(row["tags"] or ()),
        FOLDER_COLUMN: entry.id,
    }


def _change_columns(row: RunRow, reference: RunRow) -> dict[str, float | None]:
    return {
        f"{name} {_BASELINE_SUFFIX}": percent(change_ratio(row[field], reference[field]))
        for name, field in _COMPARED.items()
    }


def is_starred(entry: RunEntry, notes: Mapping[str, RunNote]) -> bool:
    """Whether the run has a star; `notes` as for `frame_runs`."""
    return notes.get(entry.run_id, RunNote()).is_starred


def matching_runs(
    entries: Sequence[RunEntry],
    found: KnownRuns,
    wanted: str,
    notes: Mapping[str, RunNote],
) -> list[RunEntry]:
    """The runs that have every wanted word: in id, name, model, plan, tags, status or note.

    `notes` as for `frame_runs`.
    """
    words = wanted.lower().split()
    if not words:
        return list(entries)
    return [
        entry
        for entry in entries
        if all(
            word in _searched(entry, found.rows.get(entry.id), notes.get(entry.run_id))
            for word in words
        )
    ]


def _searched(entry: RunEntry, row: RunRow | None, note: RunNote | None) -> str:
    facts = [entry.id, entry.name, entry.run_id]
    if note is not None:
        facts += [note.text, STAR_MARK if note.is_starred else ""]
    if row is not None:
        texts = [row[name] for name in ("model", "plan", "status", "source", "training")]
        facts += [text or "" for text in (*texts, *(row["tags"] or ()))]
    return " ".join(facts).lower()


def frame_about(manifest: RunManifest, summary: Summary) -> pd.DataFrame:
    """The known facts about the whole run as text, one row for each fact."""
    facts = {
        "run id": summary.run_id,
        "recorded (UTC)": manifest.created,
        "status": summary.status,
        "model": manifest.model.class_name,
        "plan": describe_plan(manifest),
        "mesh": ", ".join(f"{name} {size}" for name, size in manifest.mesh.items()),
        "ranks": f"{summary.num_ranks} recorded of {summary.world_size}",
        "device": manifest.device_name or manifest.device_type,
        "source": manifest.source,
        "git commit": manifest.git_commit or "",
        "tags": ", ".join(manifest.tags),
        "missing readings": " ".join(note for note in summary.notes if MISSING_READING in note),
        **{f"version: {name}": version for name, version in manifest.versions.items()},
        **{f"environment: {name}": value for name, value in manifest.environment.items()},
        **{f"config: {name}": str(value) for name, value in manifest.config.items()},
    }
    rows = [{"fact": fact, "value": value} for fact, value in facts.items() if value]
    return pd.DataFrame(rows)
