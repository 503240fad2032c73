"""Import CUDA memory snapshots as a run folder.

One file (`torch.cuda.memory._dump_snapshot`) is one process and becomes one rank. A folder of such
files becomes one rank for each file, in the order of the rank numbers in their names. The run is
written after all files are read. The run's notes list the data that a snapshot does not contain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from fsdp_inspect.errors import CorruptFileError, NotARunError
from fsdp_inspect.formatting import format_bytes, listed, plural
from fsdp_inspect.importing.snapshot_contents import SnapshotContents, parse_snapshot
from fsdp_inspect.importing.snapshot_pickle import (
    MAX_MEMORY_BYTES,
    read_plain_pickle,
    starts_like_pickle,
)
from fsdp_inspect.importing.snapshot_positions import FsdpActivity, follow_annotations, unit_names
from fsdp_inspect.importing.snapshot_rows import (
    RankSnapshot,
    find_failed_request,
    memory_rows,
    read_failed_request,
    read_history,
    read_peak,
)
from fsdp_inspect.importing.trace_file import RANK_IN_NAME, list_files
from fsdp_inspect.store.finished import (
    expect_new_folder,
    identify_import,
    unplaced_record,
    write_finished_run,
)
from fsdp_inspect.store.records import AnyRecord
from fsdp_inspect.store.schema import (
    ALLOCATIONS_FILE,
    LIVE_MEMORY_FILE,
    MEMORY,
    OUT_OF_MEMORY_FILE,
)
from fsdp_inspect.trace.allocations import to_record
from fsdp_inspect.trace.live_memory import LiveMemoryRecord
from fsdp_inspect.trace.run import FailedRequest, RunManifest, Unit

MEMORY_SNAPSHOT = "memory_snapshot"
"""The `memory_from` of imported snapshots."""

_SETTINGS_KEYS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class ImportedSnapshot:
    """The result of an import of snapshots."""

    path: Path
    """The run folder."""
    files: tuple[str, ...]
    """Names of the files, by rank."""
    units: tuple[str, ...]
    """FSDP units that the annotations name; empty without annotations."""
    num_entries: int
    """Trace entries of all ranks."""
    failed_requests: tuple[FailedRequest, ...]
    """The last failed allocation of each rank that had one."""
    notes: tuple[str, ...]
    """Data that these snapshots do not contain."""


def looks_like_snapshot(path: Path) -> bool:
    """Whether a file, or each file of a folder, begins like a memory snapshot.

    Other pickles begin in the same way. The import of such a file reports its content.
    """
    if path.is_dir():
        files = list_files(path)
        return bool(files) and all(looks_like_snapshot(file) for file in files)
    if not path.is_file():  # reading a pipe or a device may never end
        return False
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return starts_like_pickle(head)


def import_snapshot(
    path: Path, out: Path, *, name: str = "", max_memory_bytes: int = MAX_MEMORY_BYTES
) -> ImportedSnapshot:
    """Turn a memory snapshot, or a folder of one for each rank, into a run folder.

    Args:
        path: A pickle of protocol 2 to 5, or a folder that holds only such files.
        out: The run folder to create; must not exist, or be empty.
        name: Name of the run; the default is the file's name, for several files the name of `out`.
        max_memory_bytes: Memory limit for the values of one pickle.

    Returns:
        A description of the imported run.

    Raises:
        NotARunError: `path` has no snapshots.
        CorruptFileError: A file is damaged, hostile, too large, or not a snapshot. No run folder
            is left.
        StoreError: `out` exists already or cannot be written.
    """
    files = _by_rank(list_files(path))
    if not files or not all(file.is_file() for file in files):
        raise NotARunError(
            f"No memory snapshot found at {str(path)!r}. Expected a file written by "
            "torch.cuda.memory._dump_snapshot, or a folder of them. Name an existing file."
        )
    expect_new_folder(out)
    contents = [_read(file, max_memory_bytes) for file in files]
    ranks = [_place(one, file.name) for one, file in zip(contents, files, strict=True)]
    units = unit_names(rank.positions for rank in ranks)
    indices = [[units.index(name) for name in rank.positions.units] for rank in ranks]
    notes = [*_general_notes(ranks, files), *_notes_of_ranks(contents, ranks, files)]
    manifest = _describe(out, files, ranks, contents, notes)
    manifest = manifest.model_copy(update={"name": name or manifest.name})
    failed = [find_failed_request(rank, index) for rank, index in zip(ranks, indices, strict=True)]
    _write(out, manifest, ranks, indices, failed)
    return ImportedSnapshot(
        path=out,
        files=tuple(file.name for file in files),
        units=units,
        num_entries=sum(len(rank.device.trace) for rank in ranks),
        failed_requests=tuple(one for one in failed if one is not None),
        notes=tuple(notes),
    )


# --- reading


def _by_rank(files: Sequence[Path]) -> list[Path]:
    def order(file: Path) -> tuple[int, str]:
        found = RANK_IN_NAME.search(file.name)
        return (int(found[1]) if found else -1, file.name)

    return sorted(files, key=order)


def _read(path: Path, max_memory_bytes: int) -> SnapshotContents:
    with path.open("rb") as file:
        if not file.read(1):
            raise CorruptFileError(
                f"{path.name} is empty. Expected a memory snapshot. Dump it again with "
                "torch.cuda.memory._dump_snapshot; a full disk leaves empty files."
            )
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            value = read_plain_pickle(data, path.name, max_memory_bytes=max_memory_bytes)
    return parse_snapshot(value, path.name)


def _place(contents: SnapshotContents, name: str) -> RankSnapshot:
    """Select the device that the process used most, with the program's positions."""
    devices = [device for device in contents.devices if len(device.trace) or len(device.segments)]
    if not devices:
        raise CorruptFileError(
            f"{name} is an empty memory snapshot: it has no segments and no trace entries. "
            "Expected a process that used CUDA. Call _record_memory_history before training and "
            "_dump_snapshot after it, in the same process."
        )
    device = max(devices, key=lambda one: (one.reserved_bytes, len(one.trace)))
    return RankSnapshot.of(device, follow_annotations(contents.annotations), contents.places)


# --- notes and the manifest


def _general_notes(ranks: Sequence[RankSnapshot], files: Sequence[Path]) -> list[str]:
    units = unit_names(rank.positions for rank in ranks)
    notes = [
        "A memory snapshot contains sizes only: no times of steps, compute or communication, no "
        "world size and no total memory of the device. This run has "
        f"{plural(len(ranks), 'rank')} "
        f"({', '.join(file.name for file in files[:4])}{', ...' if len(files) > 4 else ''})."
    ]
    if units:
        notes.append(
            "A snapshot does not contain numbers of parameters: they are 0. The sizes of a unit "
            "are those of its largest all-gather and reduce-scatter buffers in the trace. Owners "
            "and categories are inferred from FSDP's annotations, to the microsecond."
        )
    else:
        notes.append(
            "No FSDP units are known: the snapshot has no annotations of FSDP2. Record them with "
            "torch.cuda.memory._record_memory_history(global_record_annotations=True) before the "
            "steps of interest."
        )
    named: dict[int, list[str]] = {}
    for file in files:
        if found := RANK_IN_NAME.search(file.name):
            named.setdefault(int(found[1]), []).append(file.name)
    notes += [
        f"{listed(names, 4)} all name rank {rank}, and each is a rank of this run. Import one "
        "recording at a time."
        for rank, names in named.items()
        if len(names) > 1
    ]
    if units and not any(rank.positions.has_backward for rank in ranks):
        notes.append(
            "The backward has no annotations, because it runs in a separate thread: its "
            "allocations have no owner. Record with global_record_annotations=True."
        )
    return notes


def _notes_of_ranks(
    contents: Sequence[SnapshotContents], ranks: Sequence[RankSnapshot], files: Sequence[Path]
) -> list[str]:
    """Note the data that single files lack; equal notes are joined, with all file names."""
    found: dict[str, list[str]] = {}
    for one, rank, file in zip(contents, ranks, files, strict=True):
        for note in _notes_of_rank(one, rank):
            found.setdefault(note, []).append(file.name)
    return [f"{listed(names, 4)}: {note}" for note, names in found.items()]


def _notes_of_rank(contents: SnapshotContents, rank: RankSnapshot) -> list[str]:
    device, notes = rank.device, []
    if len(device.trace) == 0:
        notes.append(
            "it has no trace, only the moment of the snapshot: the peak before it is unknown. "
            "Call _record_memory_history() before the steps of interest."
        )
    elif device.is_profile:
        notes.append(
            "it was made from a profile (profile_plot): it has no data of the allocator. Torch's "
            "categories do not distinguish sharded from unsharded parameters and gradients; all "
            "are shown as sharded."
        )
    elif rank.timeline is None:
        notes.append(
            "its trace contradicts its segments (a block allocated twice, or negative memory in "
            "use), so only the moment of the snapshot is used."
        )
    else:
        notes.append(
            f"its trace has {len(device.trace):,} entries. Memory before the first entry is "
            "unknown. Blocks that were freed before the snapshot have their requested size, "
            "rounded up to 512 B."
        )
    elsewhere = [one for one in contents.devices if one is not device and one.reserved_bytes]
    if elsewhere:
        held = ", ".join(
            f"{format_bytes(one.reserved_bytes)} on cuda:{one.device}" for one in elsewhere
        )
        notes.append(f"the process also reserved {held}. Only cuda:{device.device} is shown.")
    if rank.steps_after_failure:
        notes.append(
            f"{plural(rank.failed_requests, 'allocation')} failed, and "
            f"{plural(rank.steps_after_failure, 'step')} ended after that: the script went on."
        )
    elif rank.failed_requests > 1:
        notes.append(f"{rank.failed_requests} allocations failed; the last one is shown.")
    return notes


def _describe(
    out: Path,
    files: Sequence[Path],
    ranks: Sequence[RankSnapshot],
    contents: Sequence[SnapshotContents],
    notes: Sequence[str],
) -> RunManifest:
    taken_ns = min(_taken_ns(rank, file) for rank, file in zip(ranks, files, strict=True))
    settings, identity = contents[0].settings, identify_import(out, files, taken_ns)
    identity["recorder"]["allocator_settings"] = dict(settings)
    text = next((settings[key] for key in _SETTINGS_KEYS if settings.get(key)), "")
    return RunManifest(
        **identity,
        name=files[0].name if len(files) == 1 else out.name,
        units=_units(ranks),
        world_size=len(ranks),
        backend="unknown",
        device_type="cuda",
        environment={"PYTORCH_CUDA_ALLOC_CONF": text} if text else {},
        notes=list(notes),
    )


def _taken_ns(rank: RankSnapshot, file: Path) -> int:
    """Wall time of the snapshot; without a time in the trace, the time of the file."""
    last = int(rank.device.trace.time_us.max(initial=-1))
    is_plausible = 0 < last < 1 << 52
    return last * 1000 if is_plausible else file.stat().st_mtime_ns


def _units(ranks: Sequence[RankSnapshot]) -> list[Unit]:
    return [
        Unit(
            index=index,
            fqn=fqn,
            modules=fqn.split(", "),
            num_parameters=0,
            num_trainable_parameters=0,
            unsharded_bytes=_largest(ranks, fqn, FsdpActivity.ALL_GATHER),
            sharded_bytes=0,
            reduce_bytes=_largest(ranks, fqn, FsdpActivity.REDUCE),
            param_dtype="unknown",
            reduce_dtype="unknown",
            reshard_after_forward=None,
            is_root=fqn == "",
            execution_index=index,
            recorded_by="annotations",
        )
        for index, fqn in enumerate(unit_names(rank.positions for rank in ranks))
    ]


def _largest(ranks: Sequence[RankSnapshot], fqn: str, activity: FsdpActivity) -> int:
    return max(
        (
            rank.allocated_in(rank.positions.units.index(fqn), activity)
            for rank in ranks
            if fqn in rank.positions.units
        ),
        default=0,
    )


# --- writing


def _write(
    out: Path,
    manifest: RunManifest,
    ranks: Sequence[RankSnapshot],
    indices: Sequence[Sequence[int]],
    failed: Sequence[FailedRequest | None],
) -> None:
    with write_finished_run(out) as run:
        for number, (rank, index) in enumerate(zip(ranks, indices, strict=True)):
            fields = {
                "device": f"cuda:{rank.device.device}",
                "num_steps": len(rank.positions.step_ends_us),
                "tables": [MEMORY.name],
                "memory_from": MEMORY_SNAPSHOT,
                "failed_request": failed[number],
            }
            run.write_record(unplaced_record(manifest, number, **fields))
            run.write_table(number, MEMORY, memory_rows(rank, index))
            for name, found in _describe_rank(rank, index):
                run.write_owned(number, name, found)
        run.finish(manifest)


def _describe_rank(rank: RankSnapshot, index: Sequence[int]) -> Iterator[tuple[str, AnyRecord]]:
    """The files of what the snapshot has: allocations, the peak by line, a failed request."""
    history = read_history(rank.device)
    if history is not None:
        yield ALLOCATIONS_FILE, to_record(history, run_id="", rank=0, attempt=0)
    peak = read_peak(rank, index)
    if peak is not None:
        yield LIVE_MEMORY_FILE, LiveMemoryRecord(run_id="", rank=0, attempt=0, moments=[peak])
    failure = read_failed_request(rank, index)
    if failure is not None:
        yield OUT_OF_MEMORY_FILE, failure
