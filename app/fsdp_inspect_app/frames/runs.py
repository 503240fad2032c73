"""Build tables of all runs, and of the facts about one run."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from fsdp_inspect.analysis.run_list import change_ratio
from fsdp_inspect.result_types import RunEntry, RunKeyNumbers, RunManifest, Summary
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import mib, ms
from fsdp_inspect_app.summaries import KnownRuns, RunRow
from fsdp_inspect_app.user_store import RunNote

NAME_COLUMN, FOLDER_COLUMN = "run", "folder"
BASELINE_MARK, PIN_MARK, STAR_MARK = "baseline", "pinned", "starred"
BASELINE_SUFFIX = "vs baseline"
READING, UNREADABLE = "being read", "unreadable"
_DEFINITIONS = {
    "step time (ms)": "Typical step of the median rank; measured, unless the source says otherwise",
    "exposed (ms)": "Exposed communication of the typical step of the median rank",
    "peak allocated (MiB)": "Of the rank with the highest peak",
    "step time vs baseline": "Changes below 10% may be process noise; Compare tests them",
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
        notes: The notes and stars by id; see `notes_of`.
        names: The names of the runs by id.
        baseline: The id of the baseline. With it, the changes of the other runs are columns.
        pinned: The ids of marked runs.
    """
    starred = [run for run, note in notes.items() if note.is_starred]
    marks = {**dict.fromkeys(starred, STAR_MARK), **dict.fromkeys(pinned, PIN_MARK)}
    marks |= {baseline: BASELINE_MARK} if baseline else {}
    reference = found.rows[baseline].summary if baseline in found.rows else None
    rows = [
        {
            NAME_COLUMN: names.get(entry.id, entry.id),
            "mark": marks.get(entry.id, ""),
            "note": notes[entry.id].text if entry.id in notes else "",
            **_run_row(entry, found, reference),
        }
        for entry in entries
    ]
    # Use the columns of a known run, also if the first rows are unknown runs.
    columns: list[str] = max((list(row) for row in rows), key=len, default=[])
    frame = pd.DataFrame(rows, columns=columns)
    unused = [name for name in ("mark", "note") if not frame.get(name, pd.Series()).any()]
    frame = frame.drop(columns=unused, errors="ignore")
    frame.attrs["definitions"] = {
        name: words for name, words in _DEFINITIONS.items() if name in frame
    }
    return frame


def _run_row(entry: RunEntry, found: KnownRuns, reference: RunKeyNumbers | None) -> dict[str, Any]:
    row = found.rows.get(entry.id)
    recorded = pd.Timestamp(entry.created_unix_ns) if entry.created_unix_ns else pd.NaT
    if row is None:
        status = UNREADABLE if entry.id in found.problems else READING
        return {"status": status, "recorded (UTC)": recorded, FOLDER_COLUMN: entry.id}
    summary = row.summary
    changes = {} if reference is None else _change_columns(summary, reference)
    return {
        "status": summary.status,
        "step time (ms)": ms(summary.step_time_ns),
        "step times": [ms(value) for value in summary.step_times_ns] or None,
        "exposed (ms)": ms(summary.exposed_ns),
        "overlap": summary.overlap_ratio,
        "peak allocated (MiB)": mib(summary.peak_allocated_bytes),
        **changes,
        "ranks": row.world_size,
        "model": row.model,
        "plan": row.plan,
        "recorded (UTC)": recorded,
        "steps": summary.num_steps,
        "parameters": row.num_parameters or None,
        "source": summary.source,
        "tags": ", ".join(row.tags),
        FOLDER_COLUMN: entry.id,
    }


def _change_columns(summary: RunKeyNumbers, reference: RunKeyNumbers) -> dict[str, float | None]:
    return {
        f"step time {BASELINE_SUFFIX}": change_ratio(summary.step_time_ns, reference.step_time_ns),
        f"exposed {BASELINE_SUFFIX}": change_ratio(summary.exposed_ns, reference.exposed_ns),
        f"peak {BASELINE_SUFFIX}": change_ratio(
            summary.peak_allocated_bytes, reference.peak_allocated_bytes
        ),
    }


def notes_of(entries: Sequence[RunEntry], notes: Mapping[str, RunNote]) -> dict[str, RunNote]:
    """The notes and stars of the listed runs by their ids in the listing.

    Args:
        entries: The listed runs.
        notes: All notes and stars by the id that the recorder gave the run.
    """
    return {entry.id: notes[entry.run_id] for entry in entries if entry.run_id in notes}


def matching_runs(
    entries: Sequence[RunEntry],
    found: KnownRuns,
    wanted: str,
    notes: Mapping[str, RunNote],
) -> list[RunEntry]:
    """The runs that have every wanted word: in id, name, model, plan, tags, status or note."""
    words = wanted.lower().split()
    if not words:
        return list(entries)
    return [
        entry
        for entry in entries
        if all(
            word in _searched(entry, found.rows.get(entry.id), notes.get(entry.id))
            for word in words
        )
    ]


def _searched(entry: RunEntry, row: RunRow | None, note: RunNote | None) -> str:
    facts = [entry.id, entry.name, entry.run_id]
    if note is not None:
        facts += [note.text, STAR_MARK if note.is_starred else ""]
    if row is not None:
        facts += [row.model, row.plan, *row.tags, row.summary.status, row.summary.source]
    return " ".join(facts).lower()


def frame_about(manifest: RunManifest, summary: Summary) -> pd.DataFrame:
    """The known facts about the whole run as text, one row for each fact."""
    facts = {
        "run id": summary.run_id,
        "recorded (UTC)": manifest.created,
        "status": summary.status,
        "model": manifest.model.class_name,
        "plan": wording.describe_sharding(manifest),
        "mesh": ", ".join(f"{name} {size}" for name, size in manifest.mesh.items()),
        "ranks": f"{summary.num_ranks} recorded of {summary.world_size}",
        "device": manifest.device_name or manifest.device_type,
        "source": manifest.source,
        "git commit": manifest.git_commit or "",
        "tags": ", ".join(manifest.tags),
        **{f"version: {name}": version for name, version in manifest.versions.items()},
        **{f"environment: {name}": value for name, value in manifest.environment.items()},
        **{f"config: {name}": str(value) for name, value in manifest.config.items()},
    }
    rows = [{"fact": fact, "value": value} for fact, value in facts.items() if value]
    return pd.DataFrame(rows)
