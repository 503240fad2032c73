"""Write and read the summary files of a run and its ranks, and check whether they are current.

A rank's `summary.parquet` has all rows of the rank: rows of whole steps first, then rows of units.
The run's `summary.parquet` repeats the rows of whole steps of all ranks, by kind. An analysis of
all ranks therefore opens one file and decodes only the kinds that it needs. A summary of another
`REDUCTION_VERSION` counts as missing.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_inspect.store.compacted import (
    Footer,
    read_footer,
    write_compacted,
    write_compacted_parts,
)
from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.rank_tables import read_compacted_table
from fsdp_inspect.store.reduction.rank_rows import is_of_whole_step
from fsdp_inspect.store.schema import (
    REDUCTION_VERSION,
    ROW_GROUP_ROWS,
    SUMMARY,
    attempt_name,
    rank_name,
)
from fsdp_inspect.store.table_values import check_values
from fsdp_inspect.trace.tables import SummaryTable

Place = tuple[int, int]
"""An attempt and a rank."""


@dataclass(frozen=True, slots=True)
class SummaryFile:
    """The contents of the run's own summary."""

    rows: SummaryTable
    """Rows of whole steps; those of one kind are by attempt, rank and step."""
    places: frozenset[Place]
    """The ranks that the summary covers; empty without a current summary."""
    is_whole: bool
    """Whether `rows` has the rows of all kinds."""
    checksum: str = ""
    """Identifies the contents of the file."""


def write_rank_summary(folder: Path, rows: SummaryTable) -> None:
    """Write a rank's summary into its folder.

    Raises:
        OSError: Writing failed.
    """
    of_step = is_of_whole_step(rows)
    whole, units = rows.where(of_step), rows.where(~of_step)
    write_compacted(
        folder / SUMMARY.compacted_name,
        SUMMARY,
        SummaryTable.concat([_by_kind(whole), units]),
        covered_rows=0,
        details={"reduction": REDUCTION_VERSION},
        breaks=[len(whole)],
    )


def write_run_summary_file(
    path: Path, parts: Iterable[SummaryTable], places: Collection[Place]
) -> None:
    """Write the run's summary.

    Args:
        path: The run folder.
        parts: Rows of whole steps of some ranks; each part has the next ranks, its rows in any
            order. Only one part is in memory.
        places: The ranks that the rows cover, including ranks without a row.

    Raises:
        OSError: Writing failed.
    """
    listed: dict[str, list[int]] = {}
    for attempt, rank in sorted(places):
        listed.setdefault(str(attempt), []).append(rank)
    ordered = map(_by_kind, parts)
    write_compacted_parts(
        path / SUMMARY.compacted_name,
        SUMMARY,
        ((rows, _changes_of_kind(rows)) for rows in ordered),
        covered_rows=0,
        details={"reduction": REDUCTION_VERSION, "ranks": listed},
    )


def read_rank_summary(
    files: RunFiles,
    place: Place,
    *,
    kinds: Collection[int] | None = None,
    steps: Collection[int] | None = None,
) -> SummaryTable | None:
    """Read a rank's summary, by step, with the STEP row first in each step.

    The rows are those of this rank, whatever the file states.

    Args:
        files: The run.
        place: The attempt and the rank.
        kinds: Rows of whole steps or rows of units are left out if none has one of these kinds.
        steps: Rows of other steps may be left out.

    Returns:
        None if the summary is missing or out of date.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    contents = read_compacted_table(files, folder_of(place), SUMMARY, kinds=kinds, steps=steps)
    if contents is None or contents.details.reduction != REDUCTION_VERSION:
        return None
    rows = check_values(contents.table, f"{folder_of(place)}/{SUMMARY.compacted_name}")
    attempt, rank = (np.full(len(rows), number) for number in place)
    own = SummaryTable.from_columns({**rows.columns(), "attempt": attempt, "rank": rank})
    return own.where(np.argsort(own.step, kind="stable"))


def read_run_summary(files: RunFiles, *, kinds: Collection[int] | None = None) -> SummaryFile:
    """Read the run's own summary; row groups without any of the kinds are not decoded.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    contents = read_compacted_table(files, "", SUMMARY, kinds=kinds)
    if contents is None:
        return SummaryFile(SummaryTable.empty(), frozenset(), is_whole=True)
    places = _listed(contents.details)
    rows = SummaryTable.empty()
    if places:
        rows = check_values(contents.table, f"{files.label.rstrip('/')}/{SUMMARY.compacted_name}")
    return SummaryFile(rows, places, is_whole=contents.is_whole, checksum=contents.details.checksum)


def has_rank_summary(files: RunFiles, place: Place) -> bool:
    """Whether the rank has a current summary; only its footer is read.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    footer = _read_footer(files, folder_of(place))
    return footer is not None and footer.reduction == REDUCTION_VERSION


def summed_up(files: RunFiles) -> frozenset[Place]:
    """The ranks that the run's summary covers; only its footer is read.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    footer = _read_footer(files, "")
    return frozenset() if footer is None else _listed(footer)


def folder_of(place: Place) -> str:
    """A rank's folder in the run."""
    attempt, rank = place
    return f"{attempt_name(attempt)}/{rank_name(rank)}"


def _by_kind(rows: SummaryTable) -> SummaryTable:
    return rows.where(np.lexsort((rows.step, rows.rank, rows.kind, rows.attempt)))


def _changes_of_kind(rows: SummaryTable) -> list[int]:
    """The first row of each kind; empty if all rows fit into one row group, which is smaller."""
    if len(rows) <= ROW_GROUP_ROWS:
        return []
    changes: list[int] = (np.flatnonzero(np.diff(rows.kind)) + 1).tolist()
    return changes


def _read_footer(files: RunFiles, folder: str) -> Footer | None:
    name = f"{folder}/{SUMMARY.compacted_name}" if folder else SUMMARY.compacted_name
    source = files.open(name)
    if source is None:
        return None
    with source:
        return read_footer(source, SUMMARY, f"{files.label.rstrip('/')}/{name}")


def _listed(footer: Footer) -> frozenset[Place]:
    if footer.reduction != REDUCTION_VERSION:
        return frozenset()
    return frozenset((attempt, rank) for attempt, ranks in footer.ranks.items() for rank in ranks)
