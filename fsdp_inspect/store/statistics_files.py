"""Write and read the statistics of a run, and check whether they are current.

They condense the run's summary (`reduction.run_statistics`). Their footer has the checksum of that
summary and the settings of the run, so statistics of another state of the run are never used.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fsdp_inspect.errors import CorruptFileError, StoreError
from fsdp_inspect.store.compacted import Condensed, write_compacted
from fsdp_inspect.store.files import LocalFiles, RunFiles
from fsdp_inspect.store.rank_tables import read_compacted_table
from fsdp_inspect.store.records import decode_record
from fsdp_inspect.store.reduction.run_statistics import STATISTICS_VERSION, condense_run
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.store.schema import MANIFEST_FILE, STATISTICS
from fsdp_inspect.store.summary_files import SummaryFile, read_run_summary
from fsdp_inspect.store.table_values import check_values
from fsdp_inspect.trace.codes import EventKind, Statistic
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.tables import StatisticsTable, SummaryTable, rows_of


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
        rules = StepRules.of(decode_record(encoded, RunManifest, MANIFEST_FILE))
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
            details={"condensed": _describe(summary.checksum, rules).model_dump()},
        )


def read_statistics(
    files: RunFiles, *, of_summary: str, rules: StepRules
) -> StatisticsTable | None:
    """Read the statistics of all attempts of a run.

    Args:
        files: The run.
        of_summary: The checksum of the run's summary.
        rules: The settings of the run.

    Returns:
        None if they are missing, or if they condense another summary or with other settings.

    Raises:
        CorruptFileError: The file is damaged.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    contents = read_compacted_table(files, "", STATISTICS)
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
