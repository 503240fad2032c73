"""List the runs of a folder, with their status and key numbers.

A listing reads only the small records (`run.json`, `rank.json`), and the end of the events of a
rank that still records or was killed, so it is fast. Of a run with restarts it reads the steps of
all attempts. The key numbers of a run (`measure_key_numbers`) come from its summary, in some
milliseconds per run.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_inspect.analysis.correctness import check_training
from fsdp_inspect.analysis.lifetime import measure_known_lifetime
from fsdp_inspect.analysis.memory.peak import highest_peak_bytes
from fsdp_inspect.analysis.plain_steps import measure_other_plain_steps
from fsdp_inspect.analysis.run_heading import count_parameters
from fsdp_inspect.analysis.step_times import measure_overlap, measure_step_times
from fsdp_inspect.columns import TableSpec, metric_column, number_column, text_column
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import capitalize
from fsdp_inspect.store.files import is_url
from fsdp_inspect.store.folder import RunEntry, list_runs
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.run import RunSource

_RUNS_AT_ONCE = 16
"""Runs at a URL whose records are read at the same time."""
MOST_COURSE = 40
"""The most points of the course of the step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run of a folder of runs."""

    run_id: str | None = None
    """Id of the run; None if `run.json` cannot be read, like all fields except `notes`, `id` and
    `path`."""
    source: str | None = None
    """`recorded`, `emulated`, `imported` or `predicted`."""
    notes: tuple[str, ...]
    """Missing or unusual data, or the reason why the run cannot be read, one sentence each."""
    id: str
    """Path relative to the listed folder, with slashes."""
    path: Path | str
    """The run folder, or its URL."""
    created: str | None = None
    """Time of creation, ISO 8601, UTC."""
    status: str | None = None
    world_size: int | None = None
    num_ranks: int | None = None
    """Number of ranks that wrote data."""
    num_steps: int | None = None
    """Number of completed steps of the rank that completed the most."""
    backend: str | None = None
    device: str | None = None
    model: str | None = None
    num_parameters: int | None = None


def _ranks_of(run: ListedRun) -> str | None:
    if run.num_ranks == run.world_size:
        return None if run.world_size is None else str(run.world_size)
    return f"{run.num_ranks} of {run.world_size}"


LISTED = TableSpec(
    "Runs",
    (
        text_column("run", "The run folder.", lambda run: run.id),
        text_column(
            "created",
            "The start of the run, in UTC.",
            label="created (UTC)",
            show=lambda created: created[:16].replace("T", " "),
        ),
        text_column(
            "status", "How the run ended, or `live`.", lambda run: run.status or "unreadable"
        ),
        text_column("ranks", "The ranks that recorded something.", _ranks_of),
        number_column("num_steps", "The completed steps of the rank with the most.", label="steps"),
        text_column(
            "backend",
            "The backend of torch.distributed.",
            lambda run: "emulated" if run.backend == "fake" else run.backend,
        ),
        metric_column("num_parameters", label="params"),
    ),
)
"""The columns of `ListedRun`."""


@dataclass(frozen=True, slots=True)
class RunKeyNumbers:
    """The status and the key numbers of one run.

    The numbers equal those of the summary. They are those of the typical step of the median rank,
    and the highest peak of all ranks.
    """

    status: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    num_steps: int
    """Number of completed steps."""
    step_time_ns: int | None
    """Step time; None without a timed step, like `exposed_ns` and `overlap_ratio`."""
    plain_step_time_ns: int | None
    """The typical time of the plain steps, if it differs clearly from the step time."""
    exposed_ns: int | None
    overlap_ratio: float | None
    peak_allocated_bytes: int | None
    """None if memory was not recorded."""
    step_times_ns: tuple[int, ...] = ()
    """The course of the step time of the median rank: medians of at most `MOST_COURSE` equal parts
    of its timed steps."""


def measure_key_numbers(run: RunSource) -> RunKeyNumbers:
    """Measure the key numbers of a run for a table of runs.

    Raises:
        StoreError: A file of the run is damaged.
    """
    times, overlap = measure_step_times(run), measure_overlap(run).run
    other = measure_other_plain_steps(run)
    return RunKeyNumbers(
        status=run.status.value,
        source=run.manifest.source,
        num_steps=len(times.selection.finished),
        step_time_ns=times.step_time_ns.typical if times.step_time_ns else None,
        plain_step_time_ns=other.plain_ns if other else None,
        exposed_ns=overlap.exposed_ns if overlap else None,
        overlap_ratio=overlap.overlap_ratio if overlap else None,
        peak_allocated_bytes=highest_peak_bytes(run),
        step_times_ns=_course([each.step_time_ns for each in times.over_steps if each.is_timed]),
    )


def name_mistake(run: RunSource) -> str | None:
    """The headline of the first mistake of the training; None: none is known."""
    faults = check_training(run).faults
    return faults[0].headline if faults else None


def _course(values: list[int]) -> tuple[int, ...]:
    parts = np.array_split(np.array(values, dtype=np.int64), min(len(values), MOST_COURSE) or 1)
    return tuple(int(np.median(part)) for part in parts if len(part))


def _name_restarts(run: StoredRun) -> str | None:
    """The steps over all attempts of a run with several ones on a disk; a URL would be slow."""
    if len(run.attempts) < 2 or is_url(run.path):
        return None
    with contextlib.suppress(StoreError):
        found = measure_known_lifetime(run)
        return f"{capitalize(found.restarts)}." if found and found.restarts else None
    return None


def change_ratio(value: int | None, reference: int | None) -> float | None:
    """Return (value - reference) / reference; None if either is missing or the reference is 0."""
    if value is None or not reference:
        return None
    return value / reference - 1


def list_recorded_runs(directory: Path | str) -> tuple[ListedRun, ...]:
    """List all runs in a folder or at a URL, newest first.

    Unreadable runs come last, with the reason.

    Raises:
        StoreError: The URL cannot be listed.
    """
    entries = list_runs(directory)
    if not is_url(directory):
        return tuple(_describe(entry) for entry in entries)
    with ThreadPoolExecutor(_RUNS_AT_ONCE) as pool:
        return tuple(pool.map(_describe, entries))


def _describe(entry: RunEntry) -> ListedRun:
    manifest = entry.manifest
    if manifest is None:
        return ListedRun(
            id=entry.id, path=entry.path, notes=(entry.problem or "run.json cannot be read.",)
        )
    try:
        run = open_run(entry.path)
        status, ranks, num_steps = run.status.value, run.ranks, run.num_steps
        mistake = None
        with contextlib.suppress(StoreError):  # the notes state the damage
            mistake = name_mistake(run)
        notes = tuple(filter(None, [_name_restarts(run), *run.notes, mistake]))
    except StoreError as error:
        return ListedRun(id=entry.id, path=entry.path, notes=(str(error),))
    return ListedRun(
        run_id=manifest.run_id,
        source=manifest.source,
        notes=notes,
        id=entry.id,
        path=entry.path,
        created=manifest.created,
        status=status,
        world_size=manifest.world_size,
        num_ranks=len(ranks),
        num_steps=num_steps,
        backend=manifest.backend,
        device=manifest.device_name or manifest.device_type,
        model=manifest.model.class_name,
        num_parameters=count_parameters(manifest),
    )
