"""Read the files of a run at a URL that fsspec supports: `s3://`, `gs://`, `https://`.

Listings answer which files exist. Whole small files and blocks of tables are cached under their
ETag. A growing file is joined from its segments (`StreamSegment`).
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, TypeVar, cast

from fsdp_inspect.errors import UnreadableFileError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.boundary import VARIABLE, max_memory_bytes
from fsdp_inspect.store.records import LEAST_RECORDS, has_tag, read_record_bundle
from fsdp_inspect.store.remote_blocks import RemoteBlocks, open_user_cache
from fsdp_inspect.store.remote_listing import RemoteEntry, RemoteListing
from fsdp_inspect.store.remote_system import (
    DOWNLOADS,
    is_missing_bucket,
    open_system,
    remote_error,
    retry,
)
from fsdp_inspect.store.schema import LIVE_SUFFIX, RECORDS_FILE, attempt_name, attempt_numbers

# --- Name the segments of a growing file in an object store, which cannot append to a file.
#
# A segment is a range of the bytes of the file. `events.arrows.part-0000000000004096` begins at
# byte 4096 of `events.arrows`. Joined in order, the segments are the file up to the last upload. A
# segment may repeat bytes of the segments before it, because an interrupted upload starts again.

GROWING_SUFFIXES = (".arrows", ".jsonl")
"""Suffixes of the files that are appended to, and therefore uploaded in segments."""

_SEGMENT = re.compile(r"(.+)\.part-(\d{16})")


@dataclass(frozen=True, slots=True)
class StreamSegment:
    """One segment of a growing file."""

    name: str
    start: int
    size: int

    @property
    def end(self) -> int:
        """The first byte after the segment."""
        return self.start + self.size


def segment_name(file: str, start: int) -> str:
    """The name of the segment of a file that begins at a byte."""
    return f"{file}.part-{start:016d}"


def file_of_segment(name: str) -> str | None:
    """The name of the file that a segment belongs to; None if this is no segment."""
    found = _SEGMENT.fullmatch(name)
    return found[1] if found else None


def find_segments(file: str, sizes: Mapping[str, int]) -> list[StreamSegment]:
    """The segments of a file among these names with sizes, by start."""
    found = [
        StreamSegment(name, int(match[2]), size)
        for name, size in sizes.items()
        if (match := _SEGMENT.fullmatch(name)) and match[1] == file
    ]
    return sorted(found, key=lambda segment: (segment.start, -segment.size))


def select_gapless(segments: Iterable[StreamSegment]) -> list[StreamSegment]:
    """The segments from byte 0 to the first gap, without those that repeat others entirely."""
    chosen: list[StreamSegment] = []
    end = 0
    for segment in segments:
        if segment.start > end:
            break
        if segment.end > end:
            chosen.append(segment)
            end = segment.end
    return chosen


def join_segments(segments: Iterable[StreamSegment], contents: Iterable[bytes]) -> bytes:
    """The bytes of the file from its gapless segments and their contents."""
    parts: list[bytes] = []
    end = 0
    for segment, content in zip(segments, contents, strict=True):
        parts.append(content[end - segment.start :])
        end = segment.start + len(content)
    return b"".join(parts)


T = TypeVar("T")

REQUESTS_AT_ONCE = 32
UPLOAD_DELAY_S = 60.0
"""The time by which the files of a live run at a URL may be older than those on its disk."""
_LAG_WAITS_S = (0.2, 0.5, 1.0)
"""Waits before a listing that lags is requested again."""


@dataclass(frozen=True, slots=True)
class RemoteExtent:
    """The files of a run at one moment."""

    newest_ns: int
    """Time of the newest change; 0: unknown."""
    num_bytes: int
    has_streams: bool
    """Whether a rank has streams, so it may still record."""


def extent_of(files: Mapping[str, RemoteEntry]) -> RemoteExtent:
    """The extent of these files of a run, by name."""
    return RemoteExtent(
        newest_ns=max((each.modified_unix_ns or 0 for each in files.values()), default=0),
        num_bytes=sum(each.size or 0 for each in files.values()),
        has_streams=any(file_of_segment(name) or name.endswith(LIVE_SUFFIX) for name in files),
    )


def is_file_of_run(name: str) -> bool:
    """Whether the extent of a run counts this file: a file of the run itself or of a rank."""
    folders = name.split("/")[:-1]
    return not folders or (len(folders) == 2 and bool(attempt_numbers(folders[:1])))


class RemoteFiles:
    """A run folder at a URL, with the methods of `store.files.LocalFiles`."""

    delay_s = UPLOAD_DELAY_S

    def __init__(self, url: str) -> None:
        """Prepare to read; this sends no request.

        Raises:
            NotARunError: fsspec cannot open the URL.
        """
        self._system, self._root = open_system(url)
        self.label = url
        self._listing = RemoteListing(self._system, self._full)
        self._listing.forget()
        self._cache = open_user_cache()

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing."""
        return self._answer(name, lambda: self._read(name), None)

    def read_many(self, names: Sequence[str]) -> list[bytes | UnreadableFileError | None]:
        """All bytes of each file, in order, or its error; with concurrent requests.

        Records of many ranks come from the file that joins them.
        """
        known = self._joined_records(names) if len(names) >= LEAST_RECORDS else {}
        others = [name for name in names if name not in known]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            contents = dict(zip(others, pool.map(self._read_or_error, others), strict=True))
        return [known[name] if name in known else contents[name] for name in names]

    def open(self, name: str) -> BinaryIO | None:
        """A file for reading in parts; None if it is missing."""
        return self._answer(name, lambda: self._open(name), None)

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        return self._answer(name, lambda: list(self._listing.folder(name).folders), [])

    def names(self, folder: str) -> frozenset[str] | None:
        """Names of the files in a folder, with those of growing files; None if unknown."""
        listed = self._answer(folder, lambda: self._listing.folder(folder).files, None)
        if listed is None or not self._listing.is_complete:
            return None
        growing = filter(None, map(file_of_segment, listed))
        return frozenset({*listed, *growing})

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        return self._answer(name, lambda: self._exists(name), False)

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing or the time is unknown."""
        nothing: list[RemoteEntry] = []
        found = self._answer(name, lambda: self._newest_of(name), nothing)
        return max((each.modified_unix_ns or 0 for each in found), default=None) or None

    def tag_of(self, name: str) -> str | None:
        """The ETag of a file in the listing; None if the file is missing, empty if it has none."""
        entry = self._answer(name, lambda: self._entry(name), None)
        return None if entry is None else entry.tag

    def has_any(self) -> bool:
        """Whether anything is at the URL."""
        found = self._answer("", lambda: self._listing.folder(""), None)
        is_listed = found is not None and bool(found.files or found.folders)
        return is_listed or not self._listing.is_complete

    def list_all(self) -> dict[str, RemoteEntry] | None:
        """All files at the URL and below it, by name; None if the store cannot list them."""
        nothing: dict[str, RemoteEntry] | None = {}
        return self._answer("", self._listing.list_all, nothing)

    def extent(self) -> RemoteExtent:
        """The newest change and the size of all files, which identify their state."""
        return self._answer("", self._extent, RemoteExtent(0, 0, False))

    def _extent(self) -> RemoteExtent:
        top = self._listing.folder("")
        files = {**top.files}
        for attempt in map(attempt_name, attempt_numbers(top.folders)):
            for rank in self._listing.folder(attempt).folders:
                place = f"{attempt}/{rank}"
                found = self._listing.folder(place).files
                files |= {f"{place}/{name}": entry for name, entry in found.items()}
        return extent_of(files)

    def wait_for_listing(self, is_there: Callable[[], bool]) -> bool:
        """Whether something is there; a listing that lags is requested again for two seconds."""
        for wait_s in _LAG_WAITS_S:
            if is_there():
                return True
            time.sleep(wait_s)
            self._listing.forget()
        return is_there()

    def _read(self, name: str) -> bytes | None:
        entry = self._entry(name)
        if entry is None and self._listing.is_complete:
            return self._read_segments(name)
        if entry is not None and (entry.size or 0) > max_memory_bytes():
            raise UnreadableFileError(
                f"{self._url(name)!r} has {format_bytes(entry.size or 0)}. Expected at most "
                f"{format_bytes(max_memory_bytes())}. If the file is trusted, raise the limit with "
                f"the environment variable {VARIABLE}, such as {VARIABLE}=16GiB."
            )
        key = self._key(name, entry)
        known = self._cache.find(key) if key and self._cache is not None else None
        if known is not None and entry is not None and len(known) == entry.size:
            return known
        content = self._fetch(name)
        if key and self._cache is not None and entry is not None and len(content) == entry.size:
            self._cache.keep(key, content)
        return content

    def _joined_records(self, names: Sequence[str]) -> dict[str, bytes]:
        """The records that are joined in one file and have not changed since, by name."""
        joined = self._read_or_error(RECORDS_FILE)
        records = read_record_bundle(joined if isinstance(joined, bytes) else None)
        return {
            name: records[name]
            for name in names
            if name in records and has_tag(records[name], self.tag_of(name) or "")
        }

    def _fetch(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        parts = {} if start is None else {"start": start, "end": end}
        content = bytes(retry(lambda: self._system.cat_file(self._full(name), **parts)))
        if start is not None and end is not None and len(content) != end - start:
            raise OSError(f"received {len(content)} bytes, expected {end - start}")
        DOWNLOADS.add(len(content))
        return content

    def _read_segments(self, name: str) -> bytes | None:
        """The bytes of a growing file; None without segments. A compaction may remove them."""
        segments = self._segments(name)
        if not segments:
            return None
        folder = name.rpartition("/")[0]
        names = [f"{folder}/{segment.name}" for segment in segments]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            try:
                contents = list(pool.map(self._read_one_segment, names))
            except FileNotFoundError:
                self._listing.forget()
                return None
        return join_segments(segments, contents)

    def _read_one_segment(self, name: str) -> bytes:
        content = self._read(name)
        if content is None:
            raise FileNotFoundError(name)
        return content

    def _segments(self, name: str) -> list[StreamSegment]:
        """The gapless segments of a file. A gap may be a lag of the listing."""
        folder, _, child = name.rpartition("/")
        found: list[StreamSegment] = []

        def has_no_gap() -> bool:
            nonlocal found
            listed = find_segments(child, self._listing.folder(folder).sizes)
            found = select_gapless(listed)
            return not listed or (bool(found) and found[-1].end == max(each.end for each in listed))

        self.wait_for_listing(has_no_gap)
        return found

    def _open(self, name: str) -> BinaryIO | None:
        entry = self._entry(name)
        if entry is None and self._listing.is_complete:
            return None
        if entry is None or entry.size is None:
            entry = RemoteEntry.of(retry(lambda: self._system.info(self._full(name))))
        if entry.size is None:
            raise OSError("the server does not state the size of the file")
        key = self._key(name, entry)
        blocks = RemoteBlocks(
            lambda start, end: self._fetch(name, start, end), entry.size, self._cache, key
        )
        return cast(BinaryIO, blocks)

    def _exists(self, name: str) -> bool:
        if self._newest_of(name):
            return True
        return not self._listing.is_complete and bool(self._system.isfile(self._full(name)))

    def _newest_of(self, name: str) -> list[RemoteEntry]:
        """The entry of a file, or the entries of its segments."""
        folder, _, child = name.rpartition("/")
        files = self._listing.folder(folder).files
        if child in files:
            return [files[child]]
        return [entry for each, entry in files.items() if file_of_segment(each) == child]

    def _entry(self, name: str) -> RemoteEntry | None:
        folder, _, child = name.rpartition("/")
        return self._listing.folder(folder).files.get(child)

    def _key(self, name: str, entry: RemoteEntry | None) -> str:
        """The key in the cache; empty if the file has no ETag or another server has that name."""
        if entry is None or not entry.tag:
            return ""
        client = getattr(self._system, "endpoint_url", None) or ""
        return f"{client} {self._url(name)} {entry.tag} {entry.size}"

    def _answer(self, name: str, ask: Callable[[], T], nothing: T) -> T:
        with self._accessing(name):
            return ask()
        return nothing

    @contextlib.contextmanager
    def _accessing(self, name: str) -> Iterator[None]:
        """Ignore a missing file or folder; all other errors name it.

        Raises:
            UnreadableFileError: It cannot be read, or the server cannot be reached.
        """
        try:
            yield
        except UnreadableFileError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            if is_missing_bucket(error):
                raise remote_error(self._url(name), error) from error
        except Exception as error:  # each file system of fsspec has separate exceptions
            raise remote_error(self._url(name), error) from error

    def _read_or_error(self, name: str) -> bytes | UnreadableFileError | None:
        try:
            return self.read(name)
        except UnreadableFileError as error:
            return error

    def _url(self, name: str) -> str:
        return f"{self.label.rstrip('/')}/{name}".rstrip("/")

    def _full(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root
