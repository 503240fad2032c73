"""Read a trace file, plain or gzipped, in blocks and within limits.

A gzipped file of a few kilobytes can unpack to terabytes. The unpacked bytes are counted while they
are read, and compared with a fixed limit and with the size of the file.
"""

import ctypes
import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import msgspec

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import format_bytes

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 1 << 20
CANNOT_DECODE = (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError)
"""Invalid bytes in text raise a ValueError, out-of-range numbers an ArithmeticError."""
RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_LineT = TypeVar("_LineT")

_RATIO_GRACE_BYTES = 64 << 20
"""The limit of the ratio applies only to files that unpack to more than this."""


OnProgress = Callable[[float], None]
"""Takes the fraction of the file that is read, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Limits of an import; larger traces require larger limits."""

    max_bytes: int = 64 << 30
    """Largest unpacked size of one file."""
    max_ratio: int = 200
    """Largest ratio of unpacked to packed size. Traces reach 40; hostile files reach 1000."""
    max_event_bytes: int = 64 << 20
    """Largest size of one event, or of one other value."""


def looks_like_trace(path: Path) -> bool:
    """Whether a file begins like a trace: an object with `traceEvents`, or an array of events."""
    start = peek(path).lstrip()
    if start.startswith(b"{"):
        return b'"traceEvents"' in start
    return start.startswith(b"[") and b'"ph"' in start


def list_files(path: Path) -> list[Path]:
    """A file itself, or the files of a folder by name, without hidden ones."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for file in sorted(path.iterdir()) if file.is_file() and file.name[0] not in "._"]


def peek(path: Path) -> bytes:
    """The first unpacked block of a file; empty if it cannot be read."""
    if not path.is_file():  # reading a pipe or a device may never end
        return b""
    try:
        return next(_raw_blocks(path), (b"", 0))[0]
    except (OSError, EOFError, zlib.error):
        return b""


def read_blocks(
    path: Path, limits: ImportLimits, on_progress: OnProgress | None = None
) -> Iterator[bytes]:
    """Yield the unpacked content of a file in blocks.

    Args:
        path: The file.
        limits: Limits of the unpacked size.
        on_progress: Called after each block.

    Raises:
        ImportingError: The file cannot be opened, is empty, cut off or damaged, or unpacks to more
            than the limits allow.
    """
    count = 0
    try:
        packed = path.stat().st_size
        for block, taken in _raw_blocks(path):
            count += len(block)
            check_size(path, count, packed, limits)
            if on_progress is not None:
                on_progress(min(taken / max(packed, 1), 1.0))
            yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        place = f" after {format_bytes(count)}" if count else ""
        raise ImportingError(
            f"{path.name} cannot be unpacked{place}: "
            f"{str(error).rstrip('.')}. Expected a complete gzip file. Copy it again from where it "
            "was written; a killed profiler leaves such files."
        ) from error
    except OSError as error:
        raise ImportingError(
            f"{str(path)!r} cannot be read: {error.strerror or error}. Expected a file written by "
            "torch.profiler (export_chrome_trace). Name an existing file with read permission."
        ) from error
    if count == 0:
        raise ImportingError(
            f"{path.name} is empty. Expected a trace written by torch.profiler. A full disk leaves "
            "empty files: export the trace again."
        )


def read_json_lines(path: Path, kind: type[_LineT], expected: str) -> Iterator[_LineT]:
    """Yield the lines of a log, without an incomplete last line: a killed process leaves one.

    Raises:
        ImportingError: The file cannot be read, is empty, or a line is not of this kind.
    """
    decoder, count = msgspec.json.Decoder(kind), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    decoded = decoder.decode(line)
                except CANNOT_DECODE as error:
                    if count and not line.endswith(b"\n"):
                        return
                    raise ImportingError(
                        f"{path.name} is not {expected}: line {number:,}: {error}. Choose "
                        "another file."
                    ) from error
                count += 1
                yield decoded
    except OSError as error:
        raise ImportingError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not count:
        raise ImportingError(f"{path.name} is empty. Expected {expected}. Choose another file.")


def _raw_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield blocks, each with the number of bytes of the file read so far."""
    with path.open("rb") as file:
        is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        file.seek(0)
        source = gzip.GzipFile(fileobj=file) if is_packed else file
        while block := _read_block(source):
            yield block, file.tell()


def _read_block(source: gzip.GzipFile | BufferedReader) -> bytes:
    """The next block. Bytes behind a complete gzip file are no part of it, as for `gzip -dc`."""
    parts, size = [], 0
    try:
        while size < BLOCK_BYTES and (part := source.read1(BLOCK_BYTES - size)):
            parts.append(part)
            size += len(part)
    except gzip.BadGzipFile as error:
        if not (size or source.tell()) or not str(error).startswith("Not a gzipped file"):
            raise
    return b"".join(parts)


def check_size(path: Path, count: int, packed: int, limits: ImportLimits) -> None:
    """Check the number of unpacked bytes.

    Raises:
        ImportingError: It exceeds the limits.
    """
    if count > limits.max_bytes:
        raise ImportingError(
            f"{path.name} unpacks to more than {format_bytes(limits.max_bytes)}. Expected a trace "
            "of a few steps. Profile fewer steps, or raise the limit with --max-size."
        )
    if count > _RATIO_GRACE_BYTES and count > packed * limits.max_ratio:
        raise ImportingError(
            f"{path.name} unpacks to over {limits.max_ratio} times its {format_bytes(packed)}. "
            f"Expected at most {limits.max_ratio} times: larger ratios are typical of files made "
            "to fill memory. If you trust the file, set its largest size with --max-size."
        )


# --- Return freed memory to the operating system, because the C library keeps it in its heap.
#
# A trace is read as thousands of small arrays, which are joined to a few large arrays. The freed
# memory of the small arrays cannot hold the large ones. Without this, the process would keep both.


def return_freed_memory() -> None:
    """Return the heap's free pages; does nothing with C libraries other than glibc."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
