"""Merge the parts of one run, which several nodes wrote, into one run folder.

A node without a shared file system writes its ranks to its own disk, with a copy of `run.json`. A
merge checks that the parts belong to one run, copies them to a hidden folder, compacts that folder,
and renames it. If it is killed at any instant, the new folder is either complete or missing. The
parts stay unchanged.

Copying all parts into one folder and compacting it gives the same run without these checks: parts
of two runs with one name would mix, and a rank that was recorded twice would be overwritten.
"""

import filecmp
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.errors import NotARunError, StoreError
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.parallel.tasks import OnDone
from fsdp_inspect.store.compaction import SkippedRank, compact_run
from fsdp_inspect.store.folder import (
    describe_job_differences,
    has_running_ranks,
    list_rank_places,
    list_runs,
    rank_folder,
    read_manifest,
    read_rank_record,
)
from fsdp_inspect.store.schema import MANIFEST_FILE, PROBE_FILE
from fsdp_inspect.store.summary_files import Place
from fsdp_inspect.store.upload import is_rank_file
from fsdp_inspect.trace.run import RankRecord, RunManifest

_SPARE_BYTES = 64 << 20
"""Free space that compaction may need in addition to the copies."""
_START_UP_NS = 600 * 10**9
"""Time for which a rank without an end counts as running: it may end before a slow node starts."""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge."""

    path: Path
    run_id: str
    world_size: int
    num_ranks: int
    """Number of ranks of the last attempt in the merged run."""
    missing_ranks: tuple[tuple[int, int], ...]
    """Attempt and rank of each missing rank, for all attempts with data."""
    copies: tuple[tuple[int, int], ...]
    """Attempt and rank of each rank with identical copies in several parts."""
    skipped: tuple[SkippedRank, ...]
    """Ranks with damaged files, which were copied without compaction."""
    bytes: int
    """Size of the copied files."""
    has_run_summary: bool


def merge_runs(
    parts: Sequence[Path],
    out: Path,
    *,
    on_progress: OnDone = lambda done, total: None,
) -> MergeResult:
    """Join the parts of one run to one new run folder.

    Args:
        parts: Run folders, each with some of the ranks.
        out: The new run folder; must not exist.
        on_progress: Called after each rank with the number of copied ranks and of all ranks.

    Returns:
        The contents of the new folder, and the missing ranks.

    Raises:
        NotARunError: A part contains no run.
        StoreError: The parts belong to different runs, two parts have different recordings of one
            rank, a rank still records, `out` exists or lies in a part, or the disk is too small.
        OSError: Writing failed; the new folder does not exist.
    """
    found = [_find_part(path) for path in parts]
    _check_out(out, found)
    for part in found:
        _refuse_links_out(part)
    manifest = _check_one_run(found)
    sources, copies = _choose_sources(found)
    _check_same_time(sources)
    size = _check_room(out, sources)
    # Listings ignore folders with a name that begins with a dot.
    unfinished = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        _copy(found, sources, unfinished, on_progress)
        compacted = compact_run(unfinished)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    world_size = manifest.world_size if manifest else max(map(_recorded_world_size, found))
    last = max(attempt for attempt, _ in sources)
    return MergeResult(
        path=out,
        run_id=manifest.run_id if manifest else out.name,
        world_size=world_size,
        num_ranks=sum(attempt == last for attempt, _ in sources),
        missing_ranks=_find_missing(sources, world_size),
        copies=tuple(copies),
        skipped=tuple(compacted.skipped),
        bytes=size,
        has_run_summary=compacted.has_run_summary,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the folders to merge."""

    path: Path
    manifest: RunManifest | None
    """None if the part has no copy of `run.json`."""
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        return repr(str(self.path))

    @property
    def has_first_rank(self) -> bool:
        return any(rank == 0 for _, rank in self.places)


def _find_part(path: Path) -> _Part:
    """Read a part: the folder itself, or the only run in it."""
    inside = [] if (path / MANIFEST_FILE).exists() or list_rank_places(path) else list_runs(path)
    if len(inside) == 1:
        path = Path(inside[0].path)
    places = list_rank_places(path)
    if not places:
        several = f" It contains {len(inside)} runs: name one." if len(inside) > 1 else ""
        raise NotARunError(
            f"No ranks of a run found at {str(path)!r}.{several} Expected a run folder with the "
            "ranks of one node. Name the folder from that node's disk."
        )
    for attempt in {attempt for attempt, _ in places}:
        if has_running_ranks(path, attempt):
            raise StoreError(
                f"{str(path)!r} contains ranks that still record. Expected parts of a finished "
                "job. Merge again when the job has ended."
            )
    has_manifest = (path / MANIFEST_FILE).exists()
    return _Part(path, read_manifest(path) if has_manifest else None, tuple(places))


def _refuse_links_out(part: _Part) -> None:
    """Reject a link that leads out of the part: its target would be copied into the merged run.

    Raises:
        StoreError: The part contains such a link.
    """
    root = part.path.resolve()
    folders = [rank_folder(part.path, *place) for place in part.places]
    files = [file for folder in folders for file in _files_of(folder)]
    for path in (part.path / MANIFEST_FILE, part.path / PROBE_FILE, *folders, *files):
        if not path.resolve().is_relative_to(root):
            raise StoreError(
                f"{str(path)!r} is a link to a place outside of the run. Expected files of the run "
                "itself. Replace the link with a copy of its target, or remove it."
            )


def _check_out(out: Path, parts: Sequence[_Part]) -> None:
    if out.exists():
        raise StoreError(
            f"{str(out)!r} exists already. Expected a new folder for the merged run. Name "
            "another folder with --out."
        )
    for part in parts:
        if part.path.resolve() in out.resolve().parents:
            raise StoreError(
                f"{str(out)!r} is inside the part {part.name}, which a merge does not change. "
                "Expected a folder outside the parts. Name another folder with --out."
            )


def _check_one_run(parts: Sequence[_Part]) -> RunManifest | None:
    """The manifest of the merged run: from the part with rank 0, or else from the first part."""
    described = sorted(
        (part for part in parts if part.manifest is not None),
        key=lambda part: not part.has_first_rank,
    )
    sizes = {size: part for part in parts for size in [_recorded_world_size(part)]}
    if len(sizes) > 1:
        listed = ", ".join(f"{size} ranks in {part.name}" for size, part in sorted(sizes.items()))
        raise StoreError(
            f"The parts have different world sizes: {listed}. Expected parts of one run. Leave out "
            "the parts of the other run."
        )
    if not described:
        return None
    first = described[0].manifest
    assert first is not None
    for part in described[1:]:
        assert part.manifest is not None
        differences = describe_job_differences(first, part.manifest)
        if part.manifest.run_id != first.run_id:
            differences.insert(0, f"run is {first.run_id!r} there and {part.manifest.run_id!r} now")
        if differences:
            raise StoreError(
                f"{described[0].name} and {part.name} are parts of different runs: "
                f"{'; '.join(differences)}. Expected parts of one run. Leave out one of them."
            )
    return first


def _recorded_world_size(part: _Part) -> int:
    """The world size according to the part's manifest, or else its first readable rank."""
    if part.manifest is not None:
        return part.manifest.world_size
    for place in part.places:
        record = read_rank_record(rank_folder(part.path, *place))
        if record is not None:
            return record.world_size
    return max(rank for _, rank in part.places) + 1


def _choose_sources(parts: Sequence[_Part]) -> tuple[dict[Place, Path], list[Place]]:
    """The folder of each rank, and the ranks that several parts contain."""
    sources: dict[Place, Path] = {}
    copies: list[Place] = []
    for part in parts:
        for place in part.places:
            folder = rank_folder(part.path, *place)
            other = sources.setdefault(place, folder)
            if other is folder:
                continue
            if not _is_copy(other, folder):
                raise StoreError(
                    f"Rank {place[1]} of attempt {place[0]} was recorded twice: {str(other)!r} and "
                    f"{str(folder)!r} differ. Expected each rank once, or identical copies. "
                    "Leave out the part that is older or less complete."
                )
            copies.append(place)
    return dict(sorted(sources.items())), sorted(set(copies))


def _check_same_time(sources: Mapping[Place, Path]) -> None:
    """Reject ranks of one attempt that did not record at the same time.

    Runs with the same folder name have the same run id. The recordings of one job's ranks overlap,
    because the ranks wait for each other.
    """
    for attempt in sorted({attempt for attempt, _ in sources}):
        known = {
            folder: record
            for place, folder in sources.items()
            if place[0] == attempt and (record := read_rank_record(folder)) is not None
        }
        if not known:
            continue
        _check_one_recording(known)
        latest = max(known, key=lambda folder: known[folder].clock_start.unix_ns)
        earliest = min(known, key=lambda folder: _end_unix_ns(known[folder]))
        gap_ns = known[latest].clock_start.unix_ns - _end_unix_ns(known[earliest])
        if gap_ns > 0:
            raise StoreError(
                f"{str(latest)!r} started {format_ns(gap_ns)} after the end of {str(earliest)!r}. "
                "Expected ranks of one job, which record at the same time. These parts belong to "
                "different runs with one name: leave out the parts of the other run."
            )


def _check_one_recording(known: Mapping[Path, RankRecord]) -> None:
    """Reject ranks that state different recordings; ranks of earlier versions state none."""
    stated = {
        (record.run_id, record.run_created_unix_ns): folder
        for folder, record in known.items()
        if record.run_id
    }
    if len(stated) > 1:
        one, other, *_ = stated.values()
        raise StoreError(
            f"{str(one)!r} and {str(other)!r} belong to different recordings. Expected the ranks "
            "of one run. Leave out the parts of the other run."
        )


def _end_unix_ns(record: RankRecord) -> int:
    if record.clock_end is not None:
        return record.clock_end.unix_ns
    return max(record.flushed_unix_ns, record.clock_start.unix_ns) + _START_UP_NS


def _is_copy(one: Path, other: Path) -> bool:
    names = [path.name for path in _files_of(one)]
    if names != [path.name for path in _files_of(other)]:
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def _files_of(folder: Path) -> list[Path]:
    """The files of a rank, without temporary files and files of other programs."""
    return sorted(path for path in folder.iterdir() if path.is_file() and is_rank_file(path.name))


def _check_room(out: Path, sources: Mapping[Place, Path]) -> int:
    """Return the size of the files to copy; raises if the disk is too small."""
    size = sum(file.stat().st_size for folder in sources.values() for file in _files_of(folder))
    there = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size + _SPARE_BYTES:
        raise StoreError(
            f"The disk of {str(there)!r} has {format_bytes(free)} free. Expected at least "
            f"{format_bytes(size + _SPARE_BYTES)} for the merged run. Name a folder on another "
            "disk with --out, or run `fsdp-inspect store compact` on the parts first."
        )
    return size


def _copy(
    parts: Sequence[_Part],
    sources: Mapping[Place, Path],
    target: Path,
    on_progress: OnDone,
) -> None:
    target.mkdir(parents=True)
    for manifest in _manifest_files(parts):
        shutil.copyfile(manifest, target / MANIFEST_FILE)
        break
    probes = [part.path / PROBE_FILE for part in parts if (part.path / PROBE_FILE).is_file()]
    for probe in probes[:1]:
        shutil.copyfile(probe, target / PROBE_FILE)
    for done, (place, source) in enumerate(sources.items(), start=1):
        folder = rank_folder(target, *place)
        folder.mkdir(parents=True)
        for file in _files_of(source):
            shutil.copyfile(file, folder / file.name)
        on_progress(done, len(sources))


def _manifest_files(parts: Sequence[_Part]) -> Iterator[Path]:
    """The manifests, starting with the part of rank 0, whose manifest is the most complete."""
    for part in sorted(parts, key=lambda part: not part.has_first_rank):
        if part.manifest is not None:
            yield part.path / MANIFEST_FILE


def _find_missing(sources: Mapping[Place, Path], world_size: int) -> tuple[Place, ...]:
    attempts = sorted({attempt for attempt, _ in sources})
    return tuple(
        (attempt, rank)
        for attempt in attempts
        for rank in range(world_size)
        if (attempt, rank) not in sources
    )
