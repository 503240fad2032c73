"""Restrict a server to its folder of runs, and limit the memory that reading one file may take.

The dashboard and the MCP server take runs from a listing of that folder, so no request can name a
file. A link inside the folder could still lead out of it. A user who may write a run there must not
make a server show other files of this machine.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fsdp_inspect.errors import CorruptFileError, StoreError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.quantities import parse_bytes

_DEPTH = 2
"""Folders below a run that hold its files: attempts, and ranks in them."""


def is_in_folder(path: Path, folder: Path) -> bool:
    """Whether a path is in the folder after following all links, including links to the folder."""
    if _is_plainly_inside(path, folder):
        return True
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError, ValueError):
        return False


def _is_plainly_inside(path: Path, folder: Path) -> bool:
    """Whether the path is below the folder, exists, and contains no link; a fast check."""
    if not path.is_relative_to(folder) or ".." in path.parts:
        return False
    below = path.relative_to(folder).parts
    steps = [folder.joinpath(*below[: depth + 1]) for depth in range(len(below))]
    try:
        return not any(stat.S_ISLNK(os.lstat(step).st_mode) for step in steps)
    except (OSError, ValueError):
        return False


def files_of_run(path: Path, folder: Path) -> Iterator["os.DirEntry[str]"]:
    """All files of a run; a folder that cannot be listed counts as empty.

    Args:
        path: The run.
        folder: The folder of runs.

    Raises:
        StoreError: The run contains a link to a place outside the folder of runs.
    """
    waiting = [(str(path), _DEPTH)]
    while waiting:
        place, depth = waiting.pop()
        for entry in _list(place):
            if entry.is_symlink():
                _refuse_link_out(entry, folder)
            if not entry.is_dir():
                yield entry
            elif depth:
                waiting.append((entry.path, depth - 1))


def refuse_links_out(path: Path, folder: Path) -> None:
    """Raise `StoreError` if a run contains a link out of the folder; see `files_of_run`."""
    for _ in files_of_run(path, folder):
        pass


def _list(path: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as listing:
            return list(listing)
    except OSError:
        return []


def _refuse_link_out(link: "os.DirEntry[str]", folder: Path) -> None:
    if not is_in_folder(Path(link.path), folder):
        raise StoreError(
            f"{link.path!r} is a link to a place outside the folder of runs. The server reads "
            f"files in {str(folder)!r} only. Copy the target of the link there, or start the "
            "server with a folder that contains both."
        )


# --- Limit the memory that reading one file of a run may take.
#
# A compressed file can state any number of rows: 755 kB of Parquet decoded to 3.8 GB. The decoded
# size of a file is therefore known, or bounded, before it is decoded. It may exceed neither a part
# of FSDP_INSPECT_MAX_MEMORY nor a multiple of the file's size. The limit is an environment
# variable, so that the processes that a command starts inherit it.

VARIABLE = "FSDP_INSPECT_MAX_MEMORY"
DEFAULT_MAX_MEMORY = 8 << 30
COPIES = 4
"""Reading holds the decoded columns, the joined table, its sorted rows and their index at once."""
MAX_RATIO = 1_000
"""Largest decoded size of a file relative to its own size; below 20 in all samples."""
ALWAYS_ALLOWED = 64 << 20
"""Decoded size that is allowed for a file of any size."""


def max_memory_bytes() -> int:
    """The limit: FSDP_INSPECT_MAX_MEMORY, or else the default."""
    text = os.environ.get(VARIABLE, "")
    return (parse_bytes(text) if text else None) or DEFAULT_MAX_MEMORY


def check_decoded_size(decoded: int, file_size: int, name: str) -> None:
    """Check the decoded size of a file before the file is decoded.

    Raises:
        CorruptFileError: The file decodes to more than its size or the limit allows.
    """
    most = max_memory_bytes() // COPIES
    if decoded > most:
        raise CorruptFileError(
            f"{name} decodes to {format_bytes(decoded)}. Expected at most {format_bytes(most)}, a "
            f"quarter of the memory limit of {format_bytes(most * COPIES)}. If the file is "
            f"trusted, raise the limit with the environment variable {VARIABLE}, such as "
            f"{VARIABLE}=16GiB."
        )
    if decoded > max(ALWAYS_ALLOWED, MAX_RATIO * file_size):
        raise CorruptFileError(
            f"{name} has {format_bytes(file_size)} and decodes to {format_bytes(decoded)}. "
            f"Expected at most {MAX_RATIO:,} times its size. It was not written by fsdp-inspect: "
            "remove it, or copy the file again from where it was recorded."
        )
