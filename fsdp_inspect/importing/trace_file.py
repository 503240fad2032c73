"""What are the bytes of a trace file? Plain or gzipped, in blocks, within stated limits.

A gzipped file of a few kilobytes can hold terabytes: what comes out is counted as it comes, against
a limit of its own and against the size of the file.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import format_bytes

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 1 << 20

_RATIO_GRACE_BYTES = 64 << 20
"""Files that unpack to less than this may be packed as tightly as they like."""


OnProgress = Callable[[float], None]
"""Takes which part of the file is read, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """What an import is willing to read; larger traces need larger limits."""

    max_bytes: int = 64 << 30
    """Of one file, unpacked."""
    max_ratio: int = 200
    """Unpacked over packed. Traces reach 40; what reaches 1000 was made to."""
    max_event_bytes: int = 64 << 20
    """Of a single event, or of a single value beside the events."""


def read_blocks(
    path: Path, limits: ImportLimits, on_progress: OnProgress | None = None
) -> Iterator[bytes]:
    """The content of a file, unpacked, block by block.

    Args:
        path: The file.
        limits: How much may come out of it.
        on_progress: Called with each block.

    Raises:
        ImportingError: It cannot be opened, is empty, is cut off or damaged, or unpacks to more
            than the limits allow.
    """
    count = 0
    try:
        packed = path.stat().st_size
        for block, taken in _raw_blocks(path):
            count += len(block)
            _check(path, count, packed, limits)
            if on_progress is not None:
                on_progress(min(taken / max(packed, 1), 1.0))
            yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        place = f" after {format_bytes(count)}" if count else ""
        raise ImportingError(
            f"{path.name} cannot be unpacked{place}: "
            f"{str(error).rstrip('.')}. Expected a whole gzip file. Copy it again from where it "
            "was written; a profiler that is killed leaves such files."
        ) from error
    except OSError as error:
        raise ImportingError(
            f"{str(path)!r} cannot be read: {error.strerror or error}. Expected a file written by "
            "torch.profiler (export_chrome_trace). Name an existing one that you may read."
        ) from error
    if count == 0:
        raise ImportingError(
            f"{path.name} is empty. Expected a trace written by torch.profiler. A full disk leaves "
            "empty files: export the trace again."
        )


def _raw_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Blocks, each with how much of the file has been taken by then."""
    with path.open("rb") as file:
        is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        file.seek(0)
        source = gzip.GzipFile(fileobj=file) if is_packed else file
        while block := source.read(BLOCK_BYTES):
            yield block, file.tell()


def _check(path: Path, count: int, packed: int, limits: ImportLimits) -> None:
    if count > limits.max_bytes:
        raise ImportingError(
            f"{path.name} holds more than {format_bytes(limits.max_bytes)} unpacked. Expected a "
            "trace of a few steps. Profile fewer steps, or raise the limit with --max-size."
        )
    if count > _RATIO_GRACE_BYTES and count > packed * limits.max_ratio:
        raise ImportingError(
            f"{path.name} unpacks to over {limits.max_ratio} times its {format_bytes(packed)}. "
            f"Expected at most {limits.max_ratio} times: this looks like a file made to fill "
            "memory. If you trust it, say how large it may be with --max-size."
        )
