"""Create, find and list run folders, and decide whether their ranks still record."""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.errors import NotARunError, StoreError
from fsdp_inspect.store.files import LocalFiles, RunFiles, is_url, open_files
from fsdp_inspect.store.records import decode_record, encode_record
from fsdp_inspect.store.remote_runs import find_remote_runs
from fsdp_inspect.store.schema import (
    BLACK_BOX_FILE,
    DETAIL_REQUEST_FILE,
    MANIFEST_FILE,
    PROFILE_REQUEST_FILE,
    RANK_FILE,
    RECORDED_TABLES,
    attempt_name,
    attempt_numbers,
    rank_name,
    rank_numbers,
)
from fsdp_inspect.trace.run import JobLaunch, RankRecord, RunManifest, RunStatus
from fsdp_inspect.writing import replace_file

_CREATED = re.compile(rb'"created_unix_ns"\s*:\s*(\d{1,19})\b')
_TEXT = rb'("(?:[^"\\]|\\.)*")'
_HEAD = re.compile(
    rb'\s*\{\s*"schema_version"\s*:\s*\d+\s*,\s*"run_id"\s*:\s*'
    + _TEXT
    + rb'\s*,\s*"name"\s*:\s*'
    + _TEXT
)
"""The first fields of `run.json`, in the order in which the recorder writes them."""
_MANIFEST_S = 5.0
LISTING_DEPTH = 2
"""Levels below the listed folder that are searched (`samples/<name>/run` has two)."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run in a folder of runs. Each access reads its manifest from the disk."""

    id: str
    """Path below the listed folder, with slashes; `.` if that folder itself is the run."""
    path: Path | str
    """The run folder, or its URL."""
    created_unix_ns: int
    """Wall time of the start of the run; 0 if it cannot be read."""
    run_id: str = ""
    """The id that the recorder gave the run (`RunManifest.recorded_id`); empty if it cannot be
    read."""
    name: str = ""
    """The name of the run; empty if it has none, or it cannot be read."""

    @property
    def manifest(self) -> RunManifest | None:
        """The manifest of the run; None if it cannot be read."""
        return self._read()[0]

    @property
    def problem(self) -> str | None:
        """The error of reading the manifest; None without an error."""
        return self._read()[1]

    def _read(self) -> tuple[RunManifest | None, str | None]:
        try:
            return read_manifest(self.path).in_folder(folder_name(self.path)), None
        except StoreError as error:
            return None, str(error)


def create_run(
    path: Path,
    manifest: RunManifest,
    check: Callable[[RunManifest], None] = lambda there: None,
) -> int:
    """Create a run, or the next attempt of an existing run.

    Args:
        path: The run folder; created with its parents.
        manifest: Written once; a restart keeps the manifest of the first attempt.
        check: Called with the manifest of an existing run of the same job; raises a `StoreError`
            if it is not to be continued.

    Returns:
        The number of the new attempt, whose folder now exists.

    Raises:
        StoreError: The folder contains a run of another model, sharding or world size, or one that
            `check` refuses.
        OSError: The folder cannot be created.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MANIFEST_FILE).exists():
        with contextlib.suppress(FileExistsError):
            (path / attempt_name(0)).mkdir()  # of several jobs, one creates the run
            write_manifest_if_absent(path, manifest)
            return 0
        _await_manifest(path)
    there = read_manifest(path)
    differences = describe_job_differences(there, manifest)
    if differences:
        raise StoreError(f"{str(path)!r} contains another run: {'; '.join(differences)}.")
    check(there)
    while True:
        names = [entry.name for entry in path.iterdir()]
        attempt = max(attempt_numbers(names), default=-1) + 1
        with contextlib.suppress(FileExistsError):
            (path / attempt_name(attempt)).mkdir()
            return attempt


def _await_manifest(path: Path) -> None:
    """Wait a short time for the manifest of a run that another process has just created."""
    deadline = time.monotonic() + _MANIFEST_S
    while not (path / MANIFEST_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def last_attempt(path: Path) -> tuple[RunStatus, JobLaunch]:
    """The status of the last attempt of a run in this folder, and its start.

    An attempt without any record is running: its ranks have just started. After a minute it was
    cut off.
    """
    files = LocalFiles(path)
    number = max(attempt_numbers(files.folders("")), default=0)
    name = attempt_name(number)
    places = {rank: f"{name}/{rank_name(rank)}" for rank in rank_numbers(files.folders(name))}
    found = {rank: read_rank_record(path / place) for rank, place in places.items()}
    records = {rank: record for rank, record in found.items() if record is not None}
    if not records:
        age_s = time.time() - (path / name).stat().st_mtime
        return RunStatus.RUNNING if age_s < SILENCE_S else RunStatus.CUT_OFF, JobLaunch()
    launch = records[min(records)].launch
    for rank, record in records.items():
        if record.status is RunStatus.RUNNING:
            is_running = is_alive(record, files, places[rank])
            return RunStatus.RUNNING if is_running else RunStatus.CUT_OFF, launch
    is_complete = all(record.status is RunStatus.COMPLETE for record in records.values())
    return RunStatus.COMPLETE if is_complete else RunStatus.FAILED, launch


def write_manifest_if_absent(path: Path, manifest: RunManifest) -> bool:
    """Write `run.json` unless it exists; for the first rank of each node.

    Returns:
        Whether the file was written.

    Raises:
        OSError: The file cannot be written.
    """
    target = path / MANIFEST_FILE
    if target.exists():
        return False
    path.mkdir(parents=True, exist_ok=True)
    replace_file(target, encode_record(manifest), durable=True)
    return True


def rewrite_manifest(path: Path, manifest: RunManifest) -> None:
    """Replace `run.json` when more is known in the same attempt, after the first forward.

    The start time of the run stays unchanged.

    Raises:
        OSError: The file cannot be written; the previous file is unchanged.
    """
    with contextlib.suppress(StoreError):
        first = read_manifest(path)
        manifest = manifest.model_copy(
            update={"created": first.created, "created_unix_ns": first.created_unix_ns}
        )
    replace_file(path / MANIFEST_FILE, encode_record(manifest))


def folder_name(path: Path | str) -> str:
    """The name of a run: the last part of its path or URL; empty for the root of a file system."""
    text = str(path)
    return text.rstrip("/").rpartition("/")[2] if "://" in text else Path(text).absolute().name


def read_manifest(path: Path | str) -> RunManifest:
    """Read the manifest of a run.

    Args:
        path: The run folder, or its URL.

    Raises:
        NotARunError: `run.json` is missing.
        StoreError: `run.json` is damaged or from a newer version.
    """
    encoded = open_files(path).read(MANIFEST_FILE)
    if encoded is None:
        raise NotARunError(
            f"No run found at {str(path)!r}: {MANIFEST_FILE} is missing. Expected the folder of a "
            "run. Name another folder, or record a run with fsdp_inspect.Recorder."
        )
    return decode_record(encoded, RunManifest, f"{path}/{MANIFEST_FILE}")


def has_running_ranks(path: Path, attempt: int) -> bool:
    """Whether a rank of this attempt in this folder still records."""
    files = LocalFiles(path)
    for rank in rank_numbers(files.folders(attempt_name(attempt))):
        record = read_rank_record(rank_folder(path, attempt, rank))
        if record is None or record.status is not RunStatus.RUNNING:
            continue
        if is_alive(record, files, f"{attempt_name(attempt)}/{rank_name(rank)}"):
            return True
    return False


def rank_folder(path: Path, attempt: int, rank: int) -> Path:
    """The folder of one rank of one attempt."""
    return path / attempt_name(attempt) / rank_name(rank)


def list_rank_places(path: Path) -> list[tuple[int, int]]:
    """Attempt and rank of each rank folder of a run, ascending."""
    files = LocalFiles(path)
    return [
        (attempt, rank)
        for attempt in attempt_numbers(files.folders(""))
        for rank in rank_numbers(files.folders(attempt_name(attempt)))
    ]


def read_rank_record(folder: Path) -> RankRecord | None:
    """Read the record in a rank's folder; None if it is missing or damaged.

    Raises:
        UnreadableFileError: The file cannot be read.
    """
    encoded = LocalFiles(folder).read(RANK_FILE)
    if encoded is not None:
        with contextlib.suppress(StoreError):
            return decode_record(encoded, RankRecord, RANK_FILE)
    return None


def list_runs(directory: Path | str) -> list[RunEntry]:
    """List all runs in a folder, newest first; runs with an unreadable start time come last.

    Args:
        directory: The folder, or its URL.

    It searches the folder itself and two levels below it, but not inside runs. A missing folder
    has no runs. Listing thousands of runs takes tenths of a second; at a URL, each run takes two
    requests.

    Raises:
        NotARunError: fsspec cannot open the URL.
        UnreadableFileError: The URL cannot be listed.
    """
    if is_url(directory):
        runs = find_remote_runs(str(directory), depth=LISTING_DEPTH)
        entries = [_make_entry(run.id, run.url, run.encoded) for run in runs]
    else:
        folder = Path(str(directory).removeprefix("file://"))
        entries = [
            _read_entry(path.relative_to(folder).as_posix(), path)
            for path in _find_runs(folder, LISTING_DEPTH)
        ]
    return sorted(entries, key=lambda entry: (-entry.created_unix_ns, entry.id))


def find_named(entries: Iterable[RunEntry], name: str) -> list[RunEntry]:
    """The runs that a name can mean: the one with this id, else those named or recorded so."""
    listed = list(entries)
    exact = [entry for entry in listed if entry.id == name]
    return exact or [
        entry
        for entry in listed
        if name and name in (entry.name, entry.run_id, entry.id.rpartition("/")[2])
    ]


def list_without_manifest(directory: Path) -> list[str]:
    """The folders that hold attempts of a run but no `run.json`, as ids; see `list_runs`."""
    found = _find_without_manifest(directory, LISTING_DEPTH)
    return sorted(path.relative_to(directory).as_posix() for path in found)


def _find_without_manifest(directory: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(StoreError):
        if LocalFiles(directory).exists(MANIFEST_FILE):
            return
        names = LocalFiles(directory).folders("")
        if attempt_numbers(names):
            yield directory
        elif depth:
            for name in names:
                if not name.startswith("."):
                    yield from _find_without_manifest(directory / name, depth - 1)


def find_run_ids(directory: Path) -> list[str]:
    """The ids of the runs that `list_runs` lists, sorted, without reading any file."""
    return sorted(
        path.relative_to(directory).as_posix() for path in _find_runs(directory, LISTING_DEPTH)
    )


def _find_runs(directory: Path, depth: int) -> Iterator[Path]:
    if LocalFiles(directory).exists(MANIFEST_FILE):
        yield directory
        return
    if depth == 0:
        return
    with contextlib.suppress(StoreError):
        for name in LocalFiles(directory).folders(""):
            if not name.startswith("."):
                yield from _find_runs(directory / name, depth - 1)


def _read_entry(name: str, path: Path) -> RunEntry:
    encoded = b""
    with contextlib.suppress(StoreError):
        encoded = LocalFiles(path).read(MANIFEST_FILE) or b""
    return _make_entry(name, path, encoded)


def _make_entry(name: str, path: Path | str, encoded: bytes) -> RunEntry:
    """The start time and the names of a run, without decoding its whole manifest."""
    created, head = _CREATED.search(encoded), _HEAD.match(encoded)
    texts = ("", "")
    if head is not None:
        with contextlib.suppress(ValueError):
            texts = (json.loads(head[1]), json.loads(head[2]))
    return RunEntry(name, path, int(created[1]) if created else 0, *texts)


def describe_job_differences(there: RunManifest, new: RunManifest) -> list[str]:
    """Describe the differences of two manifests of one job; empty if they can share tables."""
    one, two = _identity(there), _identity(new)
    return [
        f"{name} is {one[name]} there and {two[name]} now" for name in one if one[name] != two[name]
    ]


def _identity(manifest: RunManifest) -> dict[str, object]:
    """The properties that all attempts must share, because the tables' indices depend on them."""
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


# --- Decide whether a rank still records or its process has exited silently.

SILENCE_S = 60.0
"""Time without writes after which a rank on another host counts as cut off. A live rank writes
every 15 s."""

_START_TIME_FIELD = 19
"""Index in /proc/<pid>/stat, after the command's closing parenthesis: proc(5), field 22."""
_START_TOLERANCE_S = 5.0


def is_alive(record: RankRecord, files: RunFiles, folder: str) -> bool:
    """Whether the process that records this rank still runs, as far as this process can see.

    In the rank's PID namespace, the process table decides. From another host or container, a rank
    counts as cut off when its files have not changed for a minute, or at a URL for two minutes.

    Args:
        record: The record of a rank with the status `running`.
        files: The run.
        folder: The rank's folder in it.
    """
    is_here = (
        record.pid_scope == pid_scope() if record.pid_scope else record.host == socket.gethostname()
    )
    if is_here:
        return _process_runs(record)
    silence_s = SILENCE_S + files.delay_s
    return time.time_ns() - last_sign_unix_ns(record, files, folder) < silence_s * 1e9


def pid_scope() -> str:
    """The scope in which this process's id is unique: the machine's boot and PID namespace.

    A host name is not enough: containers of one pod share it without sharing processes, and two
    machines may have the same one. Empty without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def last_sign_unix_ns(record: RankRecord, files: RunFiles, folder: str) -> int:
    """Time of the last write of this rank: wall time, ns.

    Another process keeps the black box, also while the rank is stopped or native code blocks it.
    """
    names = [RANK_FILE, BLACK_BOX_FILE, *(file.live_name for file in RECORDED_TABLES)]
    times = (files.modified_unix_ns(f"{folder}/{name}") for name in names)
    return max(record.flushed_unix_ns, *(moment or 0 for moment in times))


def _process_runs(record: RankRecord) -> bool:
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started = _process_start_unix_s(record.pid)
    if started is None:
        return True
    # If the id belongs to a newer process now, that process started after our record was written.
    return started <= record.clock_start.unix_ns / 1e9 + _START_TOLERANCE_S


def _process_start_unix_s(pid: int) -> float | None:
    """Start time of a process, wall time; None without /proc. A zombie has the start `inf`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime")
        )
    except (OSError, StopIteration, ValueError):
        return None
    if fields[0] in "ZX":
        return float("inf")
    return boot + int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")


def can_ask_recorder(path: Path | str) -> bool:
    """Whether `ask_for_detail` and `ask_for_profile` can write into a run folder."""
    return isinstance(path, Path) and os.access(path, os.W_OK)


def ask_for_detail(path: Path | str) -> None:
    """Ask the recorder that writes a run for a block of detailed steps.

    Args:
        path: A run folder for which `can_ask_recorder`.

    Raises:
        OSError: The file cannot be written.
    """
    (Path(path) / DETAIL_REQUEST_FILE).touch()


def ask_for_profile(path: Path | str) -> None:
    """Ask the recorder that writes a run to profile a few steps; as `ask_for_detail`."""
    (Path(path) / PROFILE_REQUEST_FILE).touch()


def is_profile_requested(path: Path | str) -> bool:
    """Whether the recorder has not yet taken a request for a profile."""
    return isinstance(path, Path) and (path / PROFILE_REQUEST_FILE).exists()
