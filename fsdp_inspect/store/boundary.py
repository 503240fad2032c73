"""Restrict a server to the files of the folder of runs that it was started with.

The dashboard and the MCP server take runs from a listing of that folder, so no request can name a
file. A link inside the folder could still lead out of it. A user who may write a run there must not
make a server show other files of this machine.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fsdp_inspect.errors import StoreError

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
