"""Write exports completely or not at all.

An export is written to a temporary path next to its destination and renamed when it is complete.
Ctrl-C, a full disk or an error leaves no partial file. Existing files are replaced only on request.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_inspect.errors import ExportError
from fsdp_inspect.writing import unfinished_path


@contextmanager
def whole_file(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Write a file that appears at its path only if the block succeeds.

    Args:
        path: The destination. Missing parent folders are created.
        replaces: Whether an existing file may be replaced.

    Yields:
        The temporary path to write to.

    Raises:
        ExportError: The path exists, or it cannot be written.
    """
    _require_free(path, replaces=replaces)
    unfinished = unfinished_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise _describe_refusal(path, error) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


@contextmanager
def whole_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Write a folder of files, as `whole_file` writes one file.

    In an existing folder, files with the same names are replaced. Other files stay.
    """
    require_free_folder(path, replaces=replaces)
    unfinished = unfinished_path(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        _move(unfinished, path)
    except OSError as error:
        raise _describe_refusal(path, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def require_free_folder(path: Path, *, replaces: bool) -> None:
    """Refuse a path that `whole_folder` refuses; for callers whose files take long to make.

    Raises:
        ExportError: The path exists and is no empty folder, unless files in it may be replaced.
    """
    if not path.is_dir() or any(path.iterdir()):
        _require_free(path, replaces=replaces and path.is_dir())


def _move(unfinished: Path, path: Path) -> None:
    if not path.exists():
        unfinished.rename(path)
        return
    for file in sorted(unfinished.iterdir()):
        file.replace(path / file.name)


def _require_free(path: Path, *, replaces: bool) -> None:
    if path.is_symlink() or path.exists():
        what = "a folder" if path.is_dir() else "a file"
        if not replaces or (path.is_dir() and path.suffix):
            raise ExportError(
                f"{str(path)!r} already exists: it is {what}. Expected a new path. Choose another "
                "--out, or add --force to replace an earlier export."
            )


def _describe_refusal(path: Path, error: OSError) -> ExportError:
    return ExportError(
        f"Cannot write {str(path)!r}: {error.strerror or error}. Expected a writable path with "
        "enough free space. No partial file remains. Choose another --out."
    )
