"""Find the folders of a catalog and of its runs, on a disk or at a URL."""

from pathlib import Path

from fsdp_inspect.catalog.folders import (
    CatalogFolder,
    LocalCatalogFolder,
    LocalRunsFolder,
    RunsFolder,
)
from fsdp_inspect.catalog.remote_folders import RemoteCatalogFolder, RemoteRunsFolder
from fsdp_inspect.store.files import is_url

FILE_PREFIX = "file://"


def as_place(place: str | Path) -> str | Path:
    """A local path as `Path`, or a URL as text without a slash at its end."""
    if is_url(place):
        return str(place).rstrip("/")
    return Path(str(place).removeprefix(FILE_PREFIX))


def join_place(folder: str | Path, name: str) -> str | Path:
    """A place below a folder; `.` is the folder itself."""
    if isinstance(folder, Path):
        return folder / name
    return folder if name == "." else f"{folder}/{name}"


def parent_of(place: str | Path) -> str | Path:
    """The folder that contains a place."""
    return place.parent if isinstance(place, Path) else place.rpartition("/")[0]


def absolute_place(place: str | Path) -> str:
    """A place as text that does not depend on the working folder."""
    return str(place.absolute()) if isinstance(place, Path) else place


def catalog_folder(place: str | Path) -> CatalogFolder:
    """Access the folder of a catalog."""
    return LocalCatalogFolder(place) if isinstance(place, Path) else RemoteCatalogFolder(place)


def runs_folder(place: str | Path) -> RunsFolder:
    """Access the folder of runs."""
    return LocalRunsFolder(place) if isinstance(place, Path) else RemoteRunsFolder(place)
