"""Write a whole run at once, for imports.

The folder has a hidden name while it is filled, and is renamed to its own name at the very end. An
aborted import leaves no folder that looks like a run.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.compacted import write_compacted
from fsdp_inspect.store.compaction import compact_rank, compact_run
from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.folder import (
    rank_folder,
    read_rank_record,
    write_manifest_if_absent,
)
from fsdp_inspect.store.rank_tables import read_table
from fsdp_inspect.store.records import AnyRecord, decode_record, encode_record
from fsdp_inspect.store.schema import EVENTS, KERNELS_FILE, RANK_FILE, TableFile, TableT
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.run import UNPLACED_CLOCK, ClockPair, RankRecord, RunManifest, RunStatus
from fsdp_inspect.trace.tables import EventTable
from fsdp_inspect.writing import replace_file

_ATTEMPT = 0
_PARTS = "parts"


class FinishedRun:
    """A run folder that is being filled; see `write_finished_run`.

    Parts are the events of ranks whose number is not known yet. Other processes that share the
    disk may write parts and events, too. They create no folder that was removed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_part(self, number: int, events: EventTable, kernels: KernelRecord) -> None:
        """Write all events and kernels of a rank whose number is not known yet.

        Raises:
            OSError: Writing failed.
        """
        folder = self.path / self._part(number)
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        write_compacted(folder / EVENTS.compacted_name, EVENTS, events, covered_rows=len(events))
        replace_file(folder / KERNELS_FILE, encode_record(kernels))

    def read_part(self, number: int) -> tuple[EventTable, KernelRecord]:
        """The events and the kernels of a part."""
        events = read_table(LocalFiles(self.path), self._part(number), EVENTS).table
        encoded = (self.path / self._part(number) / KERNELS_FILE).read_bytes()
        return events, decode_record(encoded, KernelRecord, KERNELS_FILE)

    def write_table(self, rank: int, file: TableFile[TableT], table: TableT) -> None:
        """Write all rows of a table of a rank, compacted; the rank has a record.

        Raises:
            OSError: Writing failed.
        """
        folder = self._rank_folder(rank)
        record = read_rank_record(folder)
        origin = None if record is None else record.origin
        target = folder / file.compacted_name
        write_compacted(target, file, table, covered_rows=len(table), origin=origin)

    def write_owned(self, rank: int, name: str, content: AnyRecord) -> None:
        """Write a record that states its run, its rank and its attempt, which are set here.

        Raises:
            OSError: Writing failed.
        """
        record = read_rank_record(self._rank_folder(rank))
        run_id = "" if record is None else record.run_id
        owned = {"run_id": run_id, "rank": rank, "attempt": _ATTEMPT}
        self.write_file(rank, name, encode_record(content.model_copy(update=owned)))

    def write_record(self, record: RankRecord) -> None:
        """Write the record of a rank.

        Raises:
            OSError: Writing failed.
        """
        folder = self._rank_folder(record.rank)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RANK_FILE, encode_record(record))

    def write_file(self, rank: int, name: str, content: bytes) -> None:
        """Write a file of a rank, which has a record.

        Raises:
            OSError: Writing failed.
        """
        replace_file(self._rank_folder(rank) / name, content)

    def summarise(self, rank: int) -> None:
        """Write the summary of a rank.

        Raises:
            OSError: Writing failed.
        """
        compact_rank(self.path, _ATTEMPT, rank)

    def _rank_folder(self, rank: int) -> Path:
        return rank_folder(self.path, _ATTEMPT, rank)

    def _part(self, number: int) -> str:
        return f"{_PARTS}/{number}"

    def finish(self, manifest: RunManifest) -> None:
        """Write the manifest, and the summaries of all ranks.

        Raises:
            OSError: Writing failed.
        """
        shutil.rmtree(self.path / _PARTS, ignore_errors=True)
        for left_over in self.path.rglob("*.tmp-*"):  # of processes that were killed
            left_over.unlink(missing_ok=True)
        write_manifest_if_absent(self.path, manifest)
        compact_run(self.path)


def identify_import(out: Path, files: Sequence[Path], created_ns: int) -> dict[str, Any]:
    """The fields of the manifest that follow from the imported files."""
    names = [file.name for file in files]
    digest = hashlib.sha256("\n".join([*names, str(created_ns)]).encode()).hexdigest()[:8]
    return {
        "run_id": f"{re.sub(r'[^A-Za-z0-9._-]+', '-', out.name) or 'import'}-{digest}",
        "created": datetime.fromtimestamp(created_ns / 1e9, UTC).isoformat(timespec="seconds"),
        "created_unix_ns": created_ns,
        "source": "imported",
        "recorder": {"imported_from": names},
    }


def unplaced_record(manifest: RunManifest, rank: int, **fields: Any) -> RankRecord:
    """The record of a rank whose times are not comparable with those of other ranks."""
    moment_ns = manifest.created_unix_ns
    wall = ClockPair(monotonic_ns=moment_ns, unix_ns=moment_ns, uncertainty_ns=1_000_000)
    record = RankRecord(
        rank=rank,
        world_size=manifest.world_size,
        clock=UNPLACED_CLOCK,
        clock_start=wall,
        clock_end=wall,
        status=RunStatus.IMPORTED,
        **fields,
    )
    return record.of_run(manifest)


@contextmanager
def write_finished_run(out: Path) -> Iterator[FinishedRun]:
    """Yield a folder to fill. It becomes `out` on success and is removed on an error.

    Raises:
        StoreError: `out` exists already or cannot be written.
    """
    expect_new_folder(out)
    unfinished = out.absolute().parent / f".{out.name}.unfinished-{os.getpid()}"
    try:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        yield FinishedRun(unfinished)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise StoreError(
            f"The run cannot be written to {str(out)!r}: {error.strerror or error}. Expected a "
            "writable folder with enough free space. Name another folder."
        ) from error
    finally:
        _remove(unfinished)


def _remove(folder: Path) -> None:
    """Remove a folder in which another process may still write: it no longer finds the folder."""
    hidden = folder.with_name(f"{folder.name}-removed")
    with contextlib.suppress(OSError):
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def expect_new_folder(out: Path) -> None:
    """Check that the folder of a new run is missing or empty.

    Raises:
        StoreError: It has files.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(
            f"{str(out)!r} exists already. Expected a new folder for the run. Name another folder, "
            "or remove it."
        )
