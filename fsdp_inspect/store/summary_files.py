"""Write and read the summary files of a run and its ranks, and check whether they are current.

A rank's `summary.parquet` has all rows of the rank: rows of whole steps first, then rows of units.
The run's `summary.parquet` repeats the rows of whole steps of all ranks, by kind. An analysis of
all ranks therefore opens one file and decodes only the kinds that it needs. A summary of another
`REDUCTION_VERSION` counts as missing.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_inspect.errors import CorruptFileError, StoreError
from fsdp_inspect.store.compacted import (
    Condensed,
    Footer,
    read_footer,
    write_compacted,
    write_compacted_parts,
)
from fsdp_inspect.store.files import LocalFiles, RunFiles
from fsdp_inspect.store.rank_tables import read_compacted_table
from fsdp_inspect.store.records import ExpectedOrigin, decode_record
from fsdp_inspect.store.reduction.run_statistics import (
    STATISTICS_VERSION,
    condense_run,
    is_of_whole_step,
)
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.store.schema import (
    MANIFEST_FILE,
    REDUCTION_VERSION,
    ROW_GROUP_ROWS,
    STATISTICS,
    SUMMARY,
    attempt_name,
    rank_name,
)
from fsdp_inspect.store.table_values import check_values
from fsdp_inspect.trace.codes import EventKind, Statistic
from fsdp_inspect.trace.run import RunManifest, TableOrigin
from fsdp_inspect.trace.tables import StatisticsTable, SummaryTable, rows_of

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


def write_rank_summary(folder: Path, rows: SummaryTable, origin: TableOrigin | None = None) -> None:
    """Write a rank's summary into its folder.

    Args:
        folder: The rank's folder.
        rows: All rows of the rank.
        origin: The recording of the rows, if it is known.

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
        origin=origin,
        details={"reduction": REDUCTION_VERSION},
        breaks=[len(whole)],
    )


def write_run_summary_file(
    path: Path,
    parts: Iterable[SummaryTable],
    places: Collection[Place],
    origin: TableOrigin | None = None,
) -> None:
    """Write the run's summary.

    Args:
        path: The run folder.
        parts: Rows of whole steps of some ranks; each part has the next ranks, its rows in any
            order. Only one part is in memory.
        places: The ranks that the rows cover, including ranks without a row.
        origin: The run, if it is known.

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
        origin=origin,
        details={"reduction": REDUCTION_VERSION, "ranks": listed},
    )


def read_rank_summary(
    files: RunFiles,
    place: Place,
    *,
    origin: ExpectedOrigin | None = None,
    kinds: Collection[int] | None = None,
    steps: Collection[int] | None = None,
) -> SummaryTable | None:
    """Read a rank's summary, by step, with the STEP row first in each step.

    Args:
        files: The run.
        place: The attempt and the rank.
        origin: The recording to which the file must belong; None: any.
        kinds: Rows of whole steps or rows of units are left out if none has one of these kinds.
        steps: Rows of other steps may be left out.

    Returns:
        None if the summary is missing or out of date.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    folder = folder_of(place)
    contents = read_compacted_table(files, folder, SUMMARY, origin=origin, kinds=kinds, steps=steps)
    if contents is None or contents.details.reduction != REDUCTION_VERSION:
        return None
    name = f"{folder}/{SUMMARY.compacted_name}"
    rows = check_values(contents.table, name)
    for found, expected in zip((rows.attempt, rows.rank), place, strict=True):
        if np.any(found != expected):
            raise CorruptFileError(
                f"{name} has rows of another attempt or rank. Expected attempt {place[0]}, rank "
                f"{place[1]}. It is ignored, and computed again from the events."
            )
    return rows.where(np.argsort(rows.step, kind="stable"))


def read_run_summary(
    files: RunFiles,
    *,
    origin: ExpectedOrigin | None = None,
    kinds: Collection[int] | None = None,
) -> SummaryFile:
    """Read the run's own summary; row groups without any of the kinds are not decoded.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    contents = read_compacted_table(files, "", SUMMARY, origin=origin, kinds=kinds)
    if contents is None:
        return SummaryFile(SummaryTable.empty(), frozenset(), is_whole=True)
    places = _listed(contents.details)
    rows = SummaryTable.empty()
    if places:
        rows = check_values(contents.table, f"{files.label.rstrip('/')}/{SUMMARY.compacted_name}")
    return SummaryFile(rows, places, is_whole=contents.is_whole, checksum=contents.details.checksum)


def has_rank_summary(files: RunFiles, place: Place, origin: ExpectedOrigin | None = None) -> bool:
    """Whether the rank has a current summary; only its footer is read.

    Raises:
        CorruptFileError: The file is damaged, or of another recording.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    footer = _read_footer(files, folder_of(place), origin)
    return footer is not None and footer.reduction == REDUCTION_VERSION


def summed_up(files: RunFiles, origin: ExpectedOrigin | None = None) -> frozenset[Place]:
    """The ranks that the run's summary covers; only its footer is read.

    Raises:
        CorruptFileError: The file is damaged, or of another run.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    footer = _read_footer(files, "", origin)
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


def _read_footer(files: RunFiles, folder: str, origin: ExpectedOrigin | None) -> Footer | None:
    name = f"{folder}/{SUMMARY.compacted_name}" if folder else SUMMARY.compacted_name
    source = files.open(name)
    if source is None:
        return None
    with source:
        return read_footer(source, SUMMARY, f"{files.label.rstrip('/')}/{name}", origin)


def _listed(footer: Footer) -> frozenset[Place]:
    if footer.reduction != REDUCTION_VERSION:
        return frozenset()
    return frozenset((attempt, rank) for attempt, ranks in footer.ranks.items() for rank in ranks)


# --- Write and read the statistics of a run, and check whether they are current.
#
# They condense the run's summary (`store.reduction.run_statistics`). Their footer has the checksum
# of that summary and the settings of the run, so statistics of another state of the run are never
# used.


def write_statistics(path: Path) -> None:
    """Write the statistics of a run that has a summary and a manifest, unless they are current.

    Raises:
        OSError: Writing failed.
    """
    with contextlib.suppress(StoreError):
        files = LocalFiles(path)
        encoded = files.read(MANIFEST_FILE)
        summary = read_run_summary(files, kinds=())
        if encoded is None or not summary.places:
            return
        manifest = decode_record(encoded, RunManifest, MANIFEST_FILE)
        rules = StepRules.of(manifest)
        with contextlib.suppress(StoreError):
            if read_statistics(files, of_summary=summary.checksum, rules=rules) is not None:
                return
        read = _kind_reader(files)
        table = StatisticsTable.concat(
            [
                condense_run(_of_attempt(read, attempt), rules, attempt=attempt)
                for attempt in sorted({attempt for attempt, _ in summary.places})
            ]
        )
        write_compacted(
            path / STATISTICS.compacted_name,
            STATISTICS,
            table,
            covered_rows=0,
            origin=manifest.origin(),
            details={"condensed": _describe(summary.checksum, rules).model_dump()},
        )


def read_statistics(
    files: RunFiles,
    *,
    of_summary: str,
    rules: StepRules,
    origin: ExpectedOrigin | None = None,
) -> StatisticsTable | None:
    """Read the statistics of all attempts of a run.

    Args:
        files: The run.
        of_summary: The checksum of the run's summary.
        rules: The settings of the run.
        origin: The run to which the file must belong; None: any.

    Returns:
        None if they are missing, or if they condense another summary or with other settings.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    contents = read_compacted_table(files, "", STATISTICS, origin=origin)
    if contents is None or contents.details.condensed != _describe(of_summary, rules):
        return None
    name = f"{files.label.rstrip('/')}/{STATISTICS.compacted_name}"
    table = check_values(contents.table, name)
    for attempt in np.unique(table.attempt).tolist():
        _check_ranks(table.where(table.attempt == attempt), name)
    return table


def _check_ranks(rows: StatisticsTable, name: str) -> None:
    """Check that the rows of an attempt belong to the ranks with a typical step.

    Raises:
        CorruptFileError: They do not.
    """
    of_step = rows.where((rows.statistic == Statistic.TYPICAL) & (rows.kind == EventKind.STEP))
    ranks = of_step.rank
    warm = [
        rows.rank[rows.statistic == each] for each in (Statistic.FIRST_WARM, Statistic.LAST_WARM)
    ]
    is_valid = (
        np.all(np.diff(ranks) > 0)
        and np.all(of_step.num_steps > 0)
        and np.isin(rows.rank[rows.statistic == Statistic.TYPICAL], ranks).all()
        and all(np.array_equal(rows.rank[rows.statistic == each], ranks) for each in _PER_RANK)
        and np.array_equal(*warm)
        and np.all(np.diff(warm[0]) > 0)
    )
    if not is_valid:
        raise CorruptFileError(
            f"{name} has other ranks in its rows. Expected the ranks with a typical step. Remove "
            "the file: it is computed again from the summary."
        )


_PER_RANK = (Statistic.LOW, Statistic.MIDDLE, Statistic.HIGH)


def _describe(of_summary: str, rules: StepRules) -> Condensed:
    return Condensed(
        version=STATISTICS_VERSION,
        summary=of_summary,
        num_warmup=rules.num_warmup,
        memory=tuple(sorted(rules.memory)),
        numerics_every=rules.numerics_every,
    )


_ReadKind = Callable[[int], SummaryTable]


def _kind_reader(files: RunFiles) -> _ReadKind:
    """Reads the run's summary one kind at a time; a small file is read once."""
    whole: list[SummaryFile] = []

    def read(kind: int) -> SummaryTable:
        summary = whole[0] if whole else read_run_summary(files, kinds=[kind])
        if summary.is_whole and not whole:
            whole.append(summary)
        return rows_of(summary.rows, kinds=[kind])

    return read


def _of_attempt(read: _ReadKind, attempt: int) -> _ReadKind:
    def read_own(kind: int) -> SummaryTable:
        rows = read(kind)
        return rows.where(rows.attempt == attempt)

    return read_own
