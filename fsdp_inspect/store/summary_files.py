"""Where does the run in small lie, in which order, and is it up to date?

A rank's `summary.parquet` holds all its rows: those of whole steps first, then those of units. The
run's holds the rows of whole steps once more, of all ranks and by kind, so that a question about
all ranks opens one file and decodes of it only the kinds that it is about. A summary that other
formulas made counts as absent.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_inspect.reduction.rank_rows import is_of_whole_step
from fsdp_inspect.store.compacted import read_footer, write_compacted
from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.rank_tables import read_compacted_table
from fsdp_inspect.store.schema import (
    REDUCTION_VERSION,
    ROW_GROUP_ROWS,
    SUMMARY,
    attempt_name,
    rank_name,
)
from fsdp_inspect.trace.tables import SummaryTable

Place = tuple[int, int]
"""An attempt and a rank."""


@dataclass(frozen=True, slots=True)
class SummaryFile:
    """What the run's own summary holds."""

    rows: SummaryTable
    """Rows of whole steps, by attempt, kind, rank and step."""
    places: frozenset[Place]
    """The ranks that it stands for; empty if there is no current summary."""
    is_whole: bool
    """Whether these are the rows of all kinds."""


def write_rank_summary(folder: Path, rows: SummaryTable) -> None:
    """Write a rank's summary into its folder.

    Raises:
        OSError: The disk refuses.
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


def write_run_summary_file(path: Path, rows: SummaryTable, places: Collection[Place]) -> None:
    """Write the run's summary.

    Args:
        path: The run folder.
        rows: Rows of whole steps, in any order.
        places: The ranks that they stand for, also those without a row.

    Raises:
        OSError: The disk refuses.
    """
    listed: dict[str, list[int]] = {}
    for attempt, rank in sorted(places):
        listed.setdefault(str(attempt), []).append(rank)
    ordered = _by_kind(rows)
    write_compacted(
        path / SUMMARY.compacted_name,
        SUMMARY,
        ordered,
        covered_rows=0,
        details={"reduction": REDUCTION_VERSION, "ranks": listed},
        breaks=_changes_of_kind(ordered),
    )


def read_rank_summary(
    files: RunFiles, place: Place, *, kinds: Collection[int] | None = None
) -> SummaryTable | None:
    """A rank's summary by step, the row of the step itself first.

    Args:
        files: The run.
        place: Which rank.
        kinds: Leave out the rows of whole steps, or those of units, if none is of these kinds.

    Returns:
        None if there is none, or one that must be made again.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    contents = read_compacted_table(files, folder_of(place), SUMMARY, kinds=kinds)
    if contents is None or contents.details.get("reduction") != REDUCTION_VERSION:
        return None
    return contents.table.where(np.argsort(contents.table.step, kind="stable"))


def read_run_summary(files: RunFiles, *, kinds: Collection[int] | None = None) -> SummaryFile:
    """The run's own summary; row groups without any of the kinds are not decoded.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    contents = read_compacted_table(files, "", SUMMARY, kinds=kinds)
    if contents is None:
        return SummaryFile(SummaryTable.empty(), frozenset(), is_whole=True)
    places = _listed(contents.details)
    rows = contents.table if places else SummaryTable.empty()
    return SummaryFile(rows, places, is_whole=contents.is_whole)


def has_rank_summary(files: RunFiles, place: Place) -> bool:
    """Whether the rank has a current summary; only its footer is read.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    footer = _read_footer(files, folder_of(place))
    return footer is not None and footer.get("reduction") == REDUCTION_VERSION


def summed_up(files: RunFiles) -> frozenset[Place]:
    """The ranks that the run's summary stands for; only its footer is read.

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
    """Where a kind begins; none if all of them fit into one row group, which is smaller."""
    if len(rows) <= ROW_GROUP_ROWS:
        return []
    changes: list[int] = (np.flatnonzero(np.diff(rows.kind)) + 1).tolist()
    return changes


def _read_footer(files: RunFiles, folder: str) -> Mapping[str, Any] | None:
    name = f"{folder}/{SUMMARY.compacted_name}" if folder else SUMMARY.compacted_name
    source = files.open(name)
    if source is None:
        return None
    with source:
        return read_footer(source, SUMMARY, f"{files.label.rstrip('/')}/{name}")


def _listed(footer: Mapping[str, Any]) -> frozenset[Place]:
    if footer.get("reduction") != REDUCTION_VERSION:
        return frozenset()
    listed: Mapping[str, list[int]] = footer["ranks"]
    return frozenset((int(attempt), rank) for attempt, ranks in listed.items() for rank in ranks)
