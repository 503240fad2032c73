"""Write a whole run at once, for imports.

The folder has a hidden name while it is filled, and is renamed to its own name at the very end. An
aborted import leaves no folder that looks like a run.
"""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.compacted import write_compacted
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.folder import rank_folder, write_manifest_if_absent
from fsdp_inspect.store.rank_tables import read_table
from fsdp_inspect.store.records import encode_record, replace_file
from fsdp_inspect.store.schema import BLACK_BOX_FILE, EVENTS, RANK_FILE, attempt_name, rank_name
from fsdp_inspect.trace.black_box import BlackBox, encode
from fsdp_inspect.trace.run import RankRecord, RunManifest
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

_ATTEMPT = 0


class FinishedRun:
    """A run folder that is being filled; see `write_finished_run`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_events(self, rank: int, events: EventTable) -> None:
        """Write all events of a rank, compacted.

        Raises:
            OSError: Writing failed.
        """
        folder = rank_folder(self.path, _ATTEMPT, rank)
        folder.mkdir(parents=True, exist_ok=True)
        write_compacted(folder / EVENTS.compacted_name, EVENTS, events, covered_rows=len(events))

    def write_record(self, record: RankRecord) -> None:
        """Write the record of a rank.

        Raises:
            OSError: Writing failed.
        """
        folder = rank_folder(self.path, _ATTEMPT, record.rank)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RANK_FILE, encode_record(record))

    def write_black_box(self, rank: int, box: BlackBox) -> None:
        """Write the black box of a rank.

        Raises:
            OSError: Writing failed.
        """
        (rank_folder(self.path, _ATTEMPT, rank) / BLACK_BOX_FILE).write_bytes(encode(box))

    def forget_sequences(self, rank: int, groups: Collection[int]) -> None:
        """Remove the sequence numbers of the collectives of some process groups of a rank."""
        events = self._events_of(rank)
        columns = events.columns()
        columns["sequence"] = np.where(
            np.isin(events.group, list(groups)), MISSING_INT, events.sequence
        )
        self.write_events(rank, EventTable.from_columns(columns))

    def delay(self, rank: int, by_ns: int) -> None:
        """Shift all events of a rank to later times, including known times of need."""
        events = self._events_of(rank)
        columns = events.columns()
        for name in ("issue_ns", "start_ns", "end_ns"):
            columns[name] = columns[name] + by_ns
        need = events.need_ns
        columns["need_ns"] = np.where(need == MISSING_INT, MISSING_INT, need + by_ns)
        self.write_events(rank, EventTable.from_columns(columns))

    def _events_of(self, rank: int) -> EventTable:
        folder = f"{attempt_name(_ATTEMPT)}/{rank_name(rank)}"
        return read_table(LocalFiles(self.path), folder, EVENTS).table

    def finish(self, manifest: RunManifest) -> None:
        """Write the summaries of all ranks and the manifest.

        Raises:
            OSError: Writing failed.
        """
        compact_run(self.path)
        write_manifest_if_absent(self.path, manifest)


@contextmanager
def write_finished_run(out: Path) -> Iterator[FinishedRun]:
    """Yield a folder to fill. It becomes `out` on success and is removed on an error.

    Raises:
        StoreError: `out` exists already or cannot be written.
    """
    _check_free(out)
    unfinished = out.parent / f".{out.name}.unfinished-{os.getpid()}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
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
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(
            f"{str(out)!r} exists already. Expected a new folder for the run. Name another folder, "
            "or remove it."
        )
