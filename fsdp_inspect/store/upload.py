"""Upload the files of a run to a URL, and only what is missing there.

Files that grow are uploaded in segments of their new bytes (`StreamSegment`). All other files are
uploaded again when they change. When a stream has become a Parquet file, its segments are removed.
Links are not followed, so no file from outside the run is uploaded.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_inspect.reading import InvalidTextError, open_regular, parse_json, read_regular
from fsdp_inspect.store.remote_files import (
    GROWING_SUFFIXES,
    file_of_segment,
    find_segments,
    segment_name,
    select_gapless,
)
from fsdp_inspect.store.remote_listing import RemoteEntry
from fsdp_inspect.store.remote_system import open_system
from fsdp_inspect.store.schema import (
    BLACK_BOX_FILE,
    COMPACTED_SUFFIX,
    CRASH_FILE,
    DESYNC_FILE,
    LIVE_SUFFIX,
    MANIFEST_FILE,
    NUMERICS_FILE,
    PLAN_FILE,
    PROBE_FILE,
    RANK_FILE,
    RECORDS_FILE,
    SIGTERM_FILE,
    STACKS_FILE,
    STATISTICS,
    SUMMARY,
)
from fsdp_inspect.writing import replace_file

# --- Write, list and remove files below one URL.

_WHOLE_BYTES = 64 << 20
"""Larger files are sent in parts."""


class UploadTarget:
    """The folder of a run at a URL; opened at the first request."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def put(self, name: str, content: bytes, **options: str) -> None:
        """Write a file.

        Args:
            name: The name.
            content: All bytes.
            **options: More arguments for the file system, such as `IfMatch` for S3.

        Raises:
            Exception: The error of the file system.
        """
        system, root = self._open()
        system.pipe_file(f"{root}/{name}", content, **options)

    def put_file(self, name: str, path: Path) -> None:
        """Write a file with the contents of a local file; raises as `put`, or an `OSError`."""
        if path.stat().st_size <= _WHOLE_BYTES:
            self.put(name, path.read_bytes())
            return
        system, root = self._open()
        system.put_file(str(path), f"{root}/{name}")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; raises as `put`."""
        system, root = self._open()
        for name in names:
            system.rm_file(f"{root}/{name}")

    def list_folder(self, name: str) -> dict[str, RemoteEntry]:
        """The files of a folder; empty if it is missing. Raises as `put`."""
        system, root = self._open()
        system.invalidate_cache()
        try:
            found = system.ls(f"{root}/{name}".rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            str(info["name"]).rsplit("/", 1)[-1]: RemoteEntry.of(info)
            for info in found
            if info["type"] == "file"
        }

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            system, root = open_system(self.url, can_write=True)
            self._opened = system, root.rstrip("/")
        return self._opened


UPLOAD_FILE = "upload.json"
"""In the run folder on the disk: the URL of the run in the object store."""
RUN_FILES = (
    MANIFEST_FILE,
    PLAN_FILE,
    PROBE_FILE,
    SUMMARY.compacted_name,
    STATISTICS.compacted_name,
    RECORDS_FILE,
)
"""The files of the run itself, which rank 0 writes."""
MAX_SEGMENT_BYTES = 64 << 20
MAX_SEGMENTS = 64
"""Above this number, the newest segments of a file are replaced with one."""

_RANK_SUFFIXES = (LIVE_SUFFIX, COMPACTED_SUFFIX, ".json")
_RANK_NAMES = (
    *(BLACK_BOX_FILE, DESYNC_FILE, NUMERICS_FILE),
    *(STACKS_FILE, CRASH_FILE, SIGTERM_FILE),
)
_COMPARED_BYTES = 8 << 20
"""A larger file of the same size at the URL counts as uploaded, without comparing its contents."""

Sizes = Callable[[], Mapping[str, int]]
"""Returns the sizes of complete batches of streams that are being written."""


def is_rank_file(name: str) -> bool:
    """Whether a file in a rank's folder belongs to the recording."""
    return name.endswith(_RANK_SUFFIXES) or name in _RANK_NAMES


@dataclass(frozen=True, slots=True)
class LeftOver:
    """The files that are not uploaded."""

    num_files: int = 0
    num_bytes: int = 0

    def __add__(self, other: "LeftOver") -> "LeftOver":
        return LeftOver(self.num_files + other.num_files, self.num_bytes + other.num_bytes)


class FolderUpload:
    """The upload of one folder of a run: of the run itself, or of a rank."""

    def __init__(
        self,
        folder: Path,
        target: UploadTarget,
        name: str,
        is_wanted: Callable[[str], bool],
        stream_sizes: Sizes = dict,
    ) -> None:
        """Prepare the upload; this reads and sends nothing.

        Args:
            folder: The folder on the disk.
            target: The URL of the run.
            name: The name of the folder in the run; empty for the run itself.
            is_wanted: Whether a file with this name is uploaded.
            stream_sizes: The sizes up to which streams are complete; by default their whole size.
        """
        self._folder = folder
        self._target = target
        self._name = name
        self._is_wanted = is_wanted
        self._stream_sizes = stream_sizes
        self.num_sent = self.num_sent_bytes = 0
        """The objects that were written, and their size."""
        self._sent: dict[str, tuple[int, int]] = {}
        """Time of the last change and size of the uploaded files."""
        self._ends: dict[str, int] = {}
        """The uploaded size of growing files."""
        self._starts: dict[str, list[int]] = {}
        """The starts of the segments of growing files."""
        self._compacted_from: dict[str, int] = {}
        """The number of segments of a file before the last one that replaced others."""

    def learn(self) -> None:
        """List the URL, to continue the upload of another process.

        Raises:
            Exception: The error of the file system.
        """
        listed = self._target.list_folder(self._name)
        sizes = {name: entry.size or 0 for name, entry in listed.items()}
        for file in {file for name in sizes if (file := file_of_segment(name))}:
            found = find_segments(file, sizes)
            chosen = select_gapless(found)
            self._starts[file] = [segment.start for segment in found]
            self._ends[file] = chosen[-1].end if chosen else 0
        for name, status in self._files().items():
            with contextlib.suppress(_LocalError):
                if name in listed and self._is_same(name, status, listed[name]):
                    self._sent[name] = (status.st_mtime_ns, status.st_size)

    def upload(self) -> None:
        """Upload what is new; raises the first error of the file system.

        A rank's record is last: it never describes files that are not there yet.
        """
        files = self._files()
        for name in sorted(files, key=lambda name: (name == RANK_FILE, name)):
            try:
                if name.endswith(GROWING_SUFFIXES):
                    self._upload_growing(name, self._size_of(name, files[name]))
                else:
                    self._upload_whole(name, files[name])
            except _LocalError:
                continue  # it was removed meanwhile, or cannot be read
        for name in [*self._starts]:
            if name not in files and self._has_table_of(name):
                self._forget_segments(name)

    def left(self) -> LeftOver:
        """What is not uploaded yet, according to the disk and this upload."""
        left = LeftOver()
        for name, status in self._files().items():
            if name.endswith(GROWING_SUFFIXES):
                missing = self._size_of(name, status) - self._ends.get(name, 0)
                left += LeftOver(1, missing) if missing > 0 else LeftOver()
            elif self._sent.get(name) != (status.st_mtime_ns, status.st_size):
                left += LeftOver(1, status.st_size)
        return left

    def verify(self) -> LeftOver:
        """What the URL lacks, by names and sizes; raises as `learn`."""
        listed = self._target.list_folder(self._name)
        sizes = {name: entry.size or 0 for name, entry in listed.items()}
        left = LeftOver()
        for name, status in self._files().items():
            size, there = status.st_size, sizes.get(name, 0)
            if name.endswith(GROWING_SUFFIXES):
                size = self._size_of(name, status)
                chosen = select_gapless(find_segments(name, sizes))
                there = chosen[-1].end if chosen else 0
            if there != size or (not size and name not in sizes):
                left += LeftOver(1, size)
        return left

    def _files(self) -> dict[str, os.stat_result]:
        """The files to upload; links, folders and other files are left out."""
        found = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if self._is_wanted(entry.name) and entry.name != UPLOAD_FILE:
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found[entry.name] = status
        except OSError:
            return found
        return found

    def _size_of(self, name: str, status: os.stat_result) -> int:
        return self._stream_sizes().get(name, status.st_size)

    def _is_same(self, name: str, status: os.stat_result, there: RemoteEntry) -> bool:
        """Whether the URL has this file; small files are compared by their MD5, if it is known."""
        if there.size != status.st_size:
            return False
        if status.st_size > _COMPARED_BYTES:
            return True
        content = self._read(name)
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return there.tag.strip('"') == digest

    def _read(self, name: str) -> bytes:
        try:
            return read_regular(self._folder / name, _COMPARED_BYTES)
        except OSError as error:
            raise _LocalError from error

    def _upload_whole(self, name: str, status: os.stat_result) -> None:
        state = (status.st_mtime_ns, status.st_size)
        if self._sent.get(name) == state:
            return
        if status.st_size <= _COMPARED_BYTES:
            self._put(name, self._read(name))
        else:
            self._target.put_file(self._full(name), self._folder / name)
            self._count(status.st_size)
        self._sent[name] = state

    def _upload_growing(self, name: str, size: int) -> None:
        if size < self._ends.get(name, 0):  # it was deleted: keep what the URL has of it
            return
        starts = self._starts.setdefault(name, [])
        while (end := self._ends.get(name, 0)) < size:
            part = self._read_part(name, end, min(size, end + MAX_SEGMENT_BYTES))
            self._put(segment_name(name, end), part)
            self._ends[name] = end + len(part)
            if end not in starts:
                starts.append(end)
        self._join_segments(name)

    def _join_segments(self, name: str) -> None:
        """Replace many small segments with one, so that readers need few requests.

        The first one grows, and then the others, which repeat its bytes, are removed.
        """
        first = self._compacted_from.get(name, 0)
        starts, end = self._starts[name], self._ends.get(name, 0)
        if len(starts) - first < MAX_SEGMENTS:
            return
        begin = starts[first]
        if end - begin > MAX_SEGMENT_BYTES:
            self._compacted_from[name] = len(starts)
            return
        whole = self._read_part(name, begin, end)
        self._put(segment_name(name, begin), whole)
        extra = starts[first + 1 :]
        self._target.remove(self._full(segment_name(name, start)) for start in extra)
        del starts[first + 1 :]

    def _read_part(self, name: str, start: int, end: int) -> bytes:
        try:
            with open_regular(self._folder / name) as file:
                file.seek(start)
                part = file.read(end - start)
        except OSError as error:
            raise _LocalError from error
        if len(part) != end - start:
            raise _LocalError
        return part

    def _has_table_of(self, name: str) -> bool:
        """Whether the Parquet file that replaces a stream is uploaded.

        A stream that disappears without it was deleted, or its disk has failed. Its segments are
        then the only copy.
        """
        return name.removesuffix(LIVE_SUFFIX) + COMPACTED_SUFFIX in self._sent

    def _forget_segments(self, name: str) -> None:
        """Remove the segments of a stream that a Parquet file has replaced."""
        starts = self._starts.get(name, [])
        self._target.remove(self._full(segment_name(name, start)) for start in starts)
        for known in (self._starts, self._ends, self._compacted_from):
            known.pop(name, None)

    def _put(self, name: str, content: bytes) -> None:
        self._target.put(self._full(name), content)
        self._count(len(content))

    def _count(self, num_bytes: int) -> None:
        self.num_sent += 1
        self.num_sent_bytes += num_bytes

    def _full(self, name: str) -> str:
        return f"{self._name}/{name}" if self._name else name


class _LocalError(Exception):
    """A local file cannot be read."""


def write_upload_url(run_folder: Path, url: str) -> None:
    """Note the URL of a run in its folder; `fsdp-inspect store upload` continues there.

    Raises:
        OSError: The file cannot be written.
    """
    replace_file(run_folder / UPLOAD_FILE, json.dumps({"url": url}).encode())


def read_upload_url(run_folder: Path) -> str | None:
    """The URL to which a run is uploaded; None without one."""
    try:
        fields = parse_json(read_regular(run_folder / UPLOAD_FILE, _COMPARED_BYTES))
    except (OSError, InvalidTextError):
        return None
    url = fields.get("url") if isinstance(fields, dict) else None
    return url if isinstance(url, str) and "://" in url else None


def upload_of_run(run_folder: Path, target: UploadTarget) -> FolderUpload:
    """The upload of the files of the run itself."""
    return FolderUpload(run_folder, target, "", lambda name: name in RUN_FILES)


def upload_of_rank(
    run_folder: Path, target: UploadTarget, name: str, stream_sizes: Sizes = dict
) -> FolderUpload:
    """The upload of a rank's folder."""
    return FolderUpload(run_folder / name, target, name, is_rank_file, stream_sizes)


def sum_left(uploads: Collection[FolderUpload]) -> LeftOver:
    """What several uploads lack, according to the disk."""
    return sum((upload.left() for upload in uploads), LeftOver())
