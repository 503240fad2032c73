"""Where does a run lie, and which runs are there? Making and listing run folders."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.errors import NotARunError, StoreError
from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.liveness import is_alive
from fsdp_inspect.store.records import decode_record, encode_record, replace_file
from fsdp_inspect.store.schema import (
    MANIFEST_FILE,
    RANK_FILE,
    attempt_name,
    attempt_numbers,
    rank_name,
    rank_numbers,
)
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunStatus

_CREATED = re.compile(rb'"created_unix_ns"\s*:\s*(\d{1,19})\b')
_LISTING_DEPTH = 2
"""Runs lie in the listed folder, or one folder further down (`samples/<name>/run`)."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run of a folder of runs; its manifest is read at each access, and not kept."""

    id: str
    """Path below the listed folder, with slashes; `.` if that folder is itself the run."""
    path: Path
    created_unix_ns: int
    """When it began, wall time; 0 if that cannot be read."""

    @property
    def manifest(self) -> RunManifest | None:
        """What is known about the run; None if it cannot be read."""
        return self._read()[0]

    @property
    def problem(self) -> str | None:
        """Why the manifest cannot be read, in words; None when it can."""
        return self._read()[1]

    def _read(self) -> tuple[RunManifest | None, str | None]:
        try:
            return read_manifest(self.path), None
        except (StoreError, OSError) as error:
            return None, str(error)


def create_run(path: Path, manifest: RunManifest) -> int:
    """Begin a run, or the next attempt of one that is there.

    Args:
        path: The run folder; made with its parents.
        manifest: Written once; a restart leaves the first attempt's as it is.

    Returns:
        The number of the new attempt, whose folder now exists.

    Raises:
        StoreError: The folder holds a run of another model, sharding or world size.
        OSError: The folder cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not write_manifest_if_absent(path, manifest):
        _check_same_run(path, manifest)
    while True:
        names = [entry.name for entry in path.iterdir()]
        attempt = max(attempt_numbers(names), default=-1) + 1
        with contextlib.suppress(FileExistsError):
            (path / attempt_name(attempt)).mkdir()
            return attempt


def write_manifest_if_absent(path: Path, manifest: RunManifest) -> bool:
    """Write `run.json`, unless it is there; for the first rank of every node.

    Returns:
        Whether it was written.

    Raises:
        OSError: It cannot be written.
    """
    target = path / MANIFEST_FILE
    if target.exists():
        return False
    path.mkdir(parents=True, exist_ok=True)
    replace_file(target, encode_record(manifest), durable=True)
    return True


def rewrite_manifest(path: Path, manifest: RunManifest) -> None:
    """Replace `run.json` by what is known later in the same attempt (torch's first forward).

    When the run began stays as it was.

    Raises:
        OSError: It cannot be written; the one before stays.
    """
    with contextlib.suppress(StoreError):
        first = read_manifest(path)
        manifest = manifest.model_copy(
            update={"created": first.created, "created_unix_ns": first.created_unix_ns}
        )
    replace_file(path / MANIFEST_FILE, encode_record(manifest))


def read_manifest(path: Path) -> RunManifest:
    """The manifest of a run on this disk.

    Raises:
        NotARunError: There is no `run.json`.
        StoreError: It is damaged, or from a newer version.
    """
    target = path / MANIFEST_FILE
    try:
        encoded = target.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotARunError(
            f"No run at {str(path)!r}: there is no {MANIFEST_FILE} in it. Record one with "
            "fsdp_inspect.Recorder, or give the folder of a run."
        ) from error
    return decode_record(encoded, RunManifest, str(target))


def has_running_ranks(path: Path, attempt: int) -> bool:
    """Whether a rank of this attempt, among those that lie here, still records."""
    files = LocalFiles(path)
    for rank in rank_numbers(files.folders(attempt_name(attempt))):
        folder = f"{attempt_name(attempt)}/{rank_name(rank)}"
        encoded = files.read(f"{folder}/{RANK_FILE}")
        with contextlib.suppress(StoreError):
            record = decode_record(encoded or b"", RankRecord, RANK_FILE)
            if record.status is RunStatus.RUNNING and is_alive(record, files, folder):
                return True
    return False


def rank_folder(path: Path, attempt: int, rank: int) -> Path:
    """Where one rank of one attempt writes."""
    return path / attempt_name(attempt) / rank_name(rank)


def list_runs(directory: Path) -> list[RunEntry]:
    """All runs in a folder, newest first; those whose beginning cannot be read come last.

    Looks into the folder itself and two levels down, and never into runs. A folder that does not
    exist has no runs. Quick: thousands of runs take tenths of a second.
    """
    entries = [
        RunEntry(path.relative_to(directory).as_posix(), path, _read_created(path))
        for path in _find_runs(directory, _LISTING_DEPTH)
    ]
    return sorted(entries, key=lambda entry: (-entry.created_unix_ns, entry.id))


def _find_runs(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / MANIFEST_FILE).exists():
        yield directory
        return
    if depth == 0:
        return
    with contextlib.suppress(OSError):
        for child in directory.iterdir():
            if not child.name.startswith(".") and child.is_dir():
                yield from _find_runs(child, depth - 1)


def _read_created(path: Path) -> int:
    """When a run began, without reading all of its manifest."""
    try:
        found = _CREATED.search((path / MANIFEST_FILE).read_bytes())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def find_differences(there: RunManifest, new: RunManifest) -> list[str]:
    """In what two manifests are not of one job, in words; empty if they can share tables."""
    one, two = _identity(there), _identity(new)
    return [
        f"{name} is {one[name]} there and {two[name]} now" for name in one if one[name] != two[name]
    ]


def _check_same_run(path: Path, manifest: RunManifest) -> None:
    differences = find_differences(read_manifest(path), manifest)
    if differences:
        raise StoreError(
            f"{str(path)!r} holds another run: {'; '.join(differences)}. Expected the same job, "
            "started again. Record into another folder."
        )


def _identity(manifest: RunManifest) -> dict[str, object]:
    """What an attempt must share with the first: what the tables' indices point to."""
    units = [
        f"{unit.fqn or '(root)'} ({unit.num_parameters} parameters)" for unit in manifest.units
    ]
    return {
        "world size": manifest.world_size,
        "mesh": manifest.mesh,
        "backend": manifest.backend,
        "model": f"{manifest.model.class_name} ({manifest.model.num_parameters} parameters)",
        "list of units": units,
    }
