"""How does an export reach the disk? Whole or not at all, and never over what was there before.

Everything is written beside its place and renamed when it is complete, so that Ctrl-C, a full disk
or an error leaves no half file. What already lies there is replaced only when that was asked for.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_inspect.errors import ExportError
from fsdp_inspect.store.records import unfinished_path


@contextmanager
def whole_file(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A file to write; it takes its place when the block ends well, and is gone otherwise.

    Args:
        path: Its place; missing folders above it are made.
        replaces: A file that is there already may be replaced.

    Yields:
        Where to write.

    Raises:
        ExportError: Something is there already, or the place cannot be written to.
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
    """As `whole_file`, for a folder of files.

    In a folder that exists, files of the same name are replaced and all others are left alone.
    """
    if not path.is_dir() or any(path.iterdir()):
        _require_free(path, replaces=replaces and path.is_dir())
    unfinished = unfinished_path(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        _move(unfinished, path)
    except OSError as error:
        raise _describe_refusal(path, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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
                f"There is {what} at {str(path)!r} already. Expected a new place. Choose another "
                "--out, or add --force to replace what an earlier export wrote there."
            )


def _describe_refusal(path: Path, error: OSError) -> ExportError:
    return ExportError(
        f"Cannot write {str(path)!r}: {error.strerror or error}. Expected a place on a disk with "
        "room that this user may write to. Nothing was left behind; choose another --out."
    )
