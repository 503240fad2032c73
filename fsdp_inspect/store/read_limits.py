"""Limit the memory that reading one file of a run may take.

A compressed file can state any number of rows: 755 kB of Parquet decoded to 3.8 GB. The decoded
size of a file is therefore known, or bounded, before it is decoded. It may exceed neither a part of
`--max-memory` nor a multiple of the file's size. The limit is an environment variable, so that the
processes that a command starts inherit it.
"""

import os

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.quantities import parse_bytes

VARIABLE = "FSDP_INSPECT_MAX_MEMORY"
DEFAULT_MAX_MEMORY = 8 << 30
COPIES = 4
"""Reading holds the decoded columns, the joined table, its sorted rows and their index at once."""
MAX_RATIO = 1_000
"""Largest decoded size of a file relative to its own size; below 20 in all samples."""
ALWAYS_ALLOWED = 64 << 20
"""Decoded size that is allowed for a file of any size."""


def max_memory_bytes() -> int:
    """The limit: `--max-memory`, or else the environment variable, or else the default."""
    text = os.environ.get(VARIABLE, "")
    return (parse_bytes(text) if text else None) or DEFAULT_MAX_MEMORY


def check_decoded_size(decoded: int, file_size: int, name: str) -> None:
    """Check the decoded size of a file before the file is decoded.

    Raises:
        CorruptFileError: The file decodes to more than its size or `--max-memory` allows.
    """
    most = max_memory_bytes() // COPIES
    if decoded > most:
        raise CorruptFileError(
            f"{name} decodes to {format_bytes(decoded)}. Expected at most {format_bytes(most)}, a "
            f"quarter of --max-memory ({format_bytes(most * COPIES)}). If the file is trusted, "
            "raise --max-memory."
        )
    if decoded > max(ALWAYS_ALLOWED, MAX_RATIO * file_size):
        raise CorruptFileError(
            f"{name} has {format_bytes(file_size)} and decodes to {format_bytes(decoded)}. "
            f"Expected at most {MAX_RATIO:,} times its size. It was not written by fsdp-inspect: "
            "remove it, or copy the file again from where it was recorded."
        )
