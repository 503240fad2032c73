"""Keep uploaded traces and snapshots in the folder of runs, where the page Import lists them."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import pandas as pd

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.boundary import is_in_folder
from fsdp_inspect_app.app_pages.imports.sources import ImportSource, keep_safe_letters, list_sources
from fsdp_inspect_app.tables import mib

UPLOADS = "uploads"
"""Folder for uploads, in the folder of runs."""
_MAX_NAME = 100


class Upload(Protocol):
    """A file that the browser sent, as Streamlit hands it over."""

    name: str

    def read(self, size: int = -1, /) -> bytes:
        """Read the next bytes."""
        ...


def keep_uploads(folder: Path, files: Sequence[Upload]) -> str:
    """Save uploaded files in a new folder and check that they can be imported.

    Args:
        folder: The folder of runs.
        files: One file, or one for each rank; at least one.

    Returns:
        The name of the source to import: the only file, or the folder of all files.

    Raises:
        StoreError: The folder cannot be written, or the files cannot be imported. Nothing is kept.
    """
    parent = folder / UPLOADS
    if parent.is_symlink() and not is_in_folder(parent, folder):
        raise StoreError(
            f"{str(parent)!r} leads out of the folder of runs. Expected a folder. Remove the link."
        )
    place = parent / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        place.mkdir(parents=True, exist_ok=False)
        for number, file in enumerate(files):
            with (place / _safe_name(file.name, number)).open("xb") as copy:
                _copy(file, copy)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise StoreError(
            f"The upload cannot be saved in {str(parent)!r}: {error.strerror or error}. Expected a "
            "folder that the dashboard may write. Copy the files there yourself."
        ) from error
    sources = {
        source.name: source for source in list_sources(folder) if source.path.is_relative_to(place)
    }
    if len(files) > 1:
        sources = {name: one for name, one in sources.items() if one.num_files == len(files)}
    if not sources:
        shutil.rmtree(place, ignore_errors=True)
        raise StoreError(
            f"{', '.join(file.name for file in files)}: not all files can be imported. Expected "
            "profiler traces (.json, .json.gz) or memory snapshots (.pickle), all of one kind. "
            "Upload files that torch.profiler or torch.cuda.memory wrote."
        )
    return next(iter(sources))


def _safe_name(name: str, number: int) -> str:
    """The name without folders and unusual characters, unique by its number."""
    plain = keep_safe_letters(Path(name).name).lstrip("-.")[-_MAX_NAME:]
    return plain if number == 0 else f"{number}-{plain}"


def _copy(file: Upload, copy: BinaryIO) -> None:
    while block := file.read(1 << 20):
        copy.write(block)


# --- Build tables of traces and snapshots to import.


def frame_sources(sources: Sequence[ImportSource]) -> pd.DataFrame:
    """One row for each file or folder."""
    return pd.DataFrame(
        [
            {
                "name": source.name,
                "what": source.kind.value,
                "files": source.num_files,
                "size (MiB)": mib(source.num_bytes),
            }
            for source in sources
        ]
    )
