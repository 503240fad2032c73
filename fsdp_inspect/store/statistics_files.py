"""Write and read the statistics of a run, and check whether they are current.

They condense the run's summary (`reduction.run_statistics`). Their footer has the checksum of that
summary and the settings of the run, so statistics of another state of the run are never used.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from fsdp_inspect.errors import StoreError
from fsdp_inspect.reduction.run_statistics import STATISTICS_VERSION, condense_run
from fsdp_inspect.reduction.timed_steps import StepRules
from fsdp_inspect.store.compacted import Condensed, write_compacted
from fsdp_inspect.store.files import LocalFiles, RunFiles
from fsdp_inspect.store.rank_tables import read_compacted_table
from fsdp_inspect.store.records import decode_record
from fsdp_inspect.store.schema import MANIFEST_FILE, STATISTICS
from fsdp_inspect.store.summary_files import SummaryFile, read_run_summary
from fsdp_inspect.store.table_values import check_values
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
    return check_values(contents.table, f"{files.label.rstrip('/')}/{STATISTICS.compacted_name}")


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
