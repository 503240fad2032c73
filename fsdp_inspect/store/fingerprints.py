"""Describe the state of a run's files, so that a reader can tell whether the run changed.

Listing three folders of a run is enough: no file is read. A catalog and the dashboard keep the
fingerprint of each run with its numbers, and read a run again when its fingerprint changes.
"""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.store.remote_files import RemoteExtent, RemoteFiles
from fsdp_inspect.store.schema import (
    LIVE_SUFFIX,
    attempt_name,
    attempt_numbers,
    rank_name,
    rank_numbers,
)

_LIVE_LIFE_S = 10


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of a run's files at one moment."""

    text: str
    """Changes whenever the run's numbers may change."""
    is_final: bool
    """Whether only the files matter. False for a run with live streams: it also changes with the
    time, because a process that dies changes no file."""


def fingerprint_run(path: Path | str, *, is_running: bool = False) -> Fingerprint:
    """The fingerprint of a run folder, or of a run at a URL.

    The first rank of the last attempt represents all ranks: its files change while it is recorded,
    and when it is compacted.

    Args:
        path: The run folder, or its URL.
        is_running: Whether the run was running at the last look.
    """
    if isinstance(path, str):
        return _fingerprint_url(path, is_running=is_running)
    files = _files_in(path)
    attempt = max(attempt_numbers(files), default=None)
    ranks, tables = {}, {}
    if attempt is not None:
        folder = path / attempt_name(attempt)
        ranks = _files_in(folder)
        first = min(rank_numbers(ranks), default=None)
        tables = {} if first is None else _files_in(folder / rank_name(first))
    is_live = is_running or any(name.endswith(LIVE_SUFFIX) for name in tables)
    moment = int(time.time() / _LIVE_LIFE_S) if is_live else 0
    state = (moment, sorted(ranks), *files.items(), *tables.items())
    text = hashlib.sha256(repr(state).encode()).hexdigest()
    return Fingerprint(text, is_final=not is_live)


def _fingerprint_url(url: str, *, is_running: bool) -> Fingerprint:
    return fingerprint_extent(RemoteFiles(url).extent(), is_running=is_running)


def fingerprint_extent(extent: RemoteExtent, *, is_running: bool) -> Fingerprint:
    """The fingerprint of a run at a URL from the extent of its files."""
    is_live = is_running or extent.has_streams
    moment = int(time.time() / _LIVE_LIFE_S) if is_live else 0
    return Fingerprint(f"{extent.newest_ns} {extent.num_bytes} {moment}", is_final=not is_live)


def _files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Newest change and size of the files in a folder, by name; empty if it cannot be listed."""
    try:
        with os.scandir(folder) as listing:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in listing]
    except OSError:
        return {}
    return {name: (status.st_mtime_ns, status.st_size) for name, status in sorted(found)}
