"""Import dumps of torch's flight recorder: one black box per rank, for `fsdp-inspect diagnose`.

A dump lists the last collectives of one rank. NCCL writes it when its watchdog sees a timeout
(`TORCH_NCCL_DUMP_ON_TIMEOUT`); gloo's is read with `torch._C._distributed_c10d._dump_fr_trace` or
`_dump_fr_trace_json`. A dump has no units, no steps, and no time of the dump itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import CorruptFileError, FsdpInspectError, ImportingError, NotARunError
from fsdp_inspect.formatting import format_numbers, format_ranks, plural
from fsdp_inspect.importing.flight_recorder_file import Collective, Dump, read_dump
from fsdp_inspect.importing.message_labels import ModelParts
from fsdp_inspect.importing.model_units import NamedUnits, assign_units, name_units
from fsdp_inspect.importing.trace_file import RANK_IN_NAME, list_files
from fsdp_inspect.store.finished import identify_import, unplaced_record, write_finished_run
from fsdp_inspect.store.schema import BLACK_BOX_FILE, STACKS_FILE
from fsdp_inspect.trace.black_box import (
    CAPACITY,
    EMPTY_HEADER,
    ENTRY,
    BlackBox,
    CodePlace,
    Communicator,
    Header,
    encode,
)
from fsdp_inspect.trace.codes import NO_UNIT, UNKNOWN_STEP, EventKind
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.sharders import UNKNOWN

_HEADER = replace(EMPTY_HEADER, step=UNKNOWN_STEP, unit=NO_UNIT)
_MARKS = (b"collective_seq_id", b"pg_config", b"nccl_comm_state")
_TRACE_MARKS = (b'"traceEvents"', b'"distributedInfo"', b'"deviceProperties"')
"""Fields of a trace of torch.profiler, which also lists the process groups (`pg_config`)."""
_HEAD_BYTES = 1 << 16
_RANK_AT_END = re.compile(r"(\d{1,6})(?:\.\w+)?$")
_MAX_PLACES = 400
"""The highest number of lines of code to keep, because the text of a black box is limited."""


@dataclass(frozen=True, slots=True)
class ImportedDumps:
    """The result of an import of flight recorder dumps."""

    path: Path
    """The run folder."""
    files: tuple[str, ...]
    """Names of the files, by rank."""
    ranks: tuple[int, ...]
    world_size: int
    num_collectives: int
    notes: tuple[str, ...]


def looks_like_dumps(path: Path) -> bool:
    """Whether a file, or a file of a folder, begins like a dump of the flight recorder."""
    try:
        return any(_begins_like_dump(file) for file in list_files(path))
    except OSError:
        return False


def import_dumps(
    path: Path,
    out: Path,
    *,
    name: str = "",
    model: ModelParts | None = None,
    stacks: Mapping[int, str] | None = None,
) -> ImportedDumps:
    """Turn dumps of the flight recorder into a run folder that holds a black box per rank.

    Args:
        path: One dump, or a folder of one per rank. The rank is the number in the file's name.
        out: The run folder to create; must not exist, or be empty.
        name: Name of the run; the default is the name of `path`.
        model: The parts of the model, from which the units are inferred; None: no unit has a name.
        stacks: Python stacks of ranks at the time of the dumps, as faulthandler writes them.

    Raises:
        NotARunError: `path` has no dump.
        CorruptFileError: No dump can be read.
        ImportingError: Two files are of one rank, or a name has no rank.
        StoreError: `out` exists already or cannot be written.
    """
    files = _by_rank([file for file in list_files(path) if _begins_like_dump(file)])
    if not files:
        raise NotARunError(
            f"No flight recorder dump found at {str(path)!r}. Expected files such as "
            "nccl_trace_rank_0, as pickle or JSON. Name a folder of them."
        )
    dumps, notes = _read_all(files)
    if not all(dump.has_stacks for dump in dumps.values()):
        dumps = {rank: dump.without_stacks() for rank, dump in dumps.items()}
    members = _members(dumps)
    num_issued = {rank: len(dump.collectives) for rank, dump in dumps.items()}
    dumps, behind = _without_unstarted(dumps)
    if behind:
        notes.append(
            f"Collectives are left out that {format_ranks(behind)} issued, and that the device had "
            "not started: it was in earlier work, while other ranks had started them."
        )
    world_size = _world_size(dumps, members)
    latest_ns = max(each.time_ns for dump in dumps.values() for each in dump.collectives)
    notes = [*_general_notes(), *notes, *_notes_of_times(dumps)]
    units = None
    if model is not None:
        units = _infer_units(dumps, members, model)
        dumps = {
            rank: replace(dump, collectives=assign_units(dump.collectives, units))
            for rank, dump in dumps.items()
        }
        notes.append(_note_of_units(units, model))
    boxes = _make_boxes(dumps, members, latest_ns, num_issued)
    manifest = RunManifest(
        **identify_import(out, [*files.values()], latest_ns),
        name=name or path.name,
        world_size=world_size,
        backend=next(iter(dumps.values())).backend,
        device_type=UNKNOWN,
        units=[] if units is None else units.describe(),
        notes=notes,
    )
    with write_finished_run(out) as run:
        for rank, box in boxes.items():
            run.write_record(unplaced_record(manifest, rank))
            run.write_file(rank, BLACK_BOX_FILE, encode(box))
            if stacks is not None and rank in stacks:
                run.write_file(rank, STACKS_FILE, stacks[rank].encode())
        run.finish(manifest)
    return ImportedDumps(
        path=out,
        files=tuple(files[rank].name for rank in boxes),
        ranks=tuple(boxes),
        world_size=world_size,
        num_collectives=sum(len(dump.collectives) for dump in dumps.values()),
        notes=tuple(notes),
    )


# --- reading


def _begins_like_dump(file: Path) -> bool:
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    is_trace = any(mark in head for mark in _TRACE_MARKS)
    return not is_trace and any(mark in head for mark in _MARKS)


def _by_rank(files: Sequence[Path]) -> dict[int, Path]:
    """Sort the files by rank. A pickle wins over the JSON of the same rank, which has no stacks."""
    found: dict[int, Path] = {}
    for file in sorted(files, key=lambda file: file.suffix == ".json"):
        number = RANK_IN_NAME.search(file.name) or _RANK_AT_END.search(file.name)
        if number is None:
            raise ImportingError(
                f"{file.name} has no rank in its name. Expected a name that ends in the rank, as "
                "nccl_trace_rank_0. Rename the file."
            )
        rank = int(number[1])
        other = found.setdefault(rank, file)
        if other is not file and (other.suffix == ".json") == (file.suffix == ".json"):
            raise ImportingError(
                f"{other.name} and {file.name} are both of rank {rank}. Expected one dump per "
                "rank. Move one of them to another folder."
            )
    return dict(sorted(found.items()))


def _read_all(files: dict[int, Path]) -> tuple[dict[int, Dump], list[str]]:
    """Read the dumps by rank, and collect the reasons why others cannot be read."""
    dumps, notes, first_error = {}, [], None
    for rank, file in files.items():
        try:
            dump = read_dump(file)
        except (FsdpInspectError, OSError) as error:
            first_error = first_error or error
            notes.append(f"Rank {rank} is missing, because its dump cannot be read: {error}")
            continue
        if dump.num_left_out:
            notes.append(
                f"{file.name}: {plural(dump.num_left_out, 'entry', 'entries')} left out, because "
                "one has no usable number or process group. Write the dump again."
            )
            if not dump.collectives:
                notes.append(f"Rank {rank} is missing: none of its entries is left.")
                continue
        if dump.collectives:  # a black box holds fewer than a dump can, and all compare these
            dumps[rank] = replace(dump, collectives=dump.collectives[-(CAPACITY - 1) :])
        else:
            notes.append(
                f"Rank {rank} is missing: {file.name} lists no collective. Set "
                "TORCH_FR_BUFFER_SIZE=2000 before the training starts."
            )
    if not dumps:
        if isinstance(first_error, FsdpInspectError):
            raise first_error
        raise CorruptFileError(f"No dump can be read. {' '.join(notes)}")
    return dumps, notes


def _without_unstarted(dumps: dict[int, Dump]) -> tuple[dict[int, Dump], list[int]]:
    """Cut what the device of a rank had not reached, and other devices had started.

    Returns:
        The dumps, and the ranks of which something is cut.
    """
    running: dict[str, int] = {}
    ended: dict[str, int] = {}  # all ranks have joined these: a dump without them is older
    for dump in dumps.values():
        for each in dump.collectives:
            is_message = each.kind is EventKind.POINT_TO_POINT
            if (each.is_start_seen or each.completed_ns) and not is_message:
                last = ended if each.completed_ns else running
                last[each.group] = max(last.get(each.group, -1), each.sequence)
    kept, behind = dict(dumps), []
    for rank, dump in dumps.items():
        cut: dict[str, int] = {}
        is_older = any(each.sequence <= ended.get(each.group, -1) for each in dump.unfinished())
        sees_starts = any(each.is_start_seen for each in dump.collectives)
        for each in dump.unfinished() if sees_starts and not is_older else ():
            if each.sequence <= running.get(each.group, -1) and not each.is_start_seen:
                cut.setdefault(each.group, each.sequence)
        rest = tuple(
            each
            for each in dump.collectives
            if each.kind is EventKind.POINT_TO_POINT
            or each.sequence < cut.get(each.group, sys.maxsize)
        )
        if cut and rest:
            kept[rank] = replace(dump, collectives=rest)
            behind.append(rank)
    return kept, behind


def _members(dumps: dict[int, Dump]) -> dict[str, tuple[int, ...]]:
    """The ranks of each group, as a dump lists them or else those that issued a collective in it.

    If no dump lists the ranks of a group, an all-gather shows its size. If that is also the largest
    size, the group is the world.
    """
    listed = {name: ranks for dump in dumps.values() for name, ranks in dump.groups.items()}
    sizes: dict[str, int] = {}
    users: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for each in dump.collectives:
            users.setdefault(each.group, set()).add(rank)
            sizes[each.group] = max(sizes.get(each.group, 0), each.group_size)
    largest = max(sizes.values(), default=0)
    found = {}
    for name, ranks in users.items():
        known = tuple(sorted(ranks))
        is_world = sizes[name] == largest and sizes[name] > max(known)
        found[name] = listed.get(name) or (tuple(range(largest)) if is_world else known)
    return found


def _world_size(dumps: dict[int, Dump], members: dict[str, tuple[int, ...]]) -> int:
    largest = max((max(ranks) for ranks in members.values()), default=0)
    return max(largest, *dumps) + 1


def _infer_units(
    dumps: dict[int, Dump], members: dict[str, tuple[int, ...]], model: ModelParts
) -> NamedUnits:
    """The units by group and position: all ranks issue the same up to their first difference."""
    groups = {}
    for name, ranks in members.items():
        issued: dict[int, Collective] = {}
        for dump in dumps.values():
            issued |= {each.sequence: each for each in dump.ordered(name)}
        in_order = [each for _, each in sorted(issued.items())]
        if in_order:
            size = max(each.group_size for each in in_order) or len(ranks)
            differs = _first_difference(dumps, name, 0, in_order[-1].sequence)
            groups[name] = (in_order, size, differs)
    return name_units(groups, model)


# --- black boxes


def _make_boxes(
    dumps: dict[int, Dump],
    members: dict[str, tuple[int, ...]],
    latest_ns: int,
    num_issued: dict[int, int],
) -> dict[int, BlackBox]:
    """The boxes by rank. They show a standstill, which the diagnosis then calls probable.

    No dump states when it was written, and a copy changes the time of its file. A header counts
    more collectives than its box holds if the device had not started all.
    """
    begins, ends = {}, {}
    for name in members:
        ordered = [each for dump in dumps.values() if (each := dump.ordered(name))]
        begins[name] = max((each[0].sequence for each in ordered), default=0)
        ends[name] = min((each[-1].sequence for each in ordered), default=0)
        differs = _first_difference(dumps, name, begins[name], ends[name])
        ends[name] = min(ends[name], differs - 1)
    has_ends = any(each.completed_ns for dump in dumps.values() for each in dump.collectives)
    return {
        rank: _make_box(
            rank,
            dump,
            members,
            begins,
            {} if has_ends else ends,
            replace(
                _HEADER,
                rank=rank,
                num_issued=num_issued[rank],
                sign_ns=latest_ns,
                sign_unix_ns=latest_ns,
                hang_seen_ns=latest_ns,
            ),
        )
        for rank, dump in dumps.items()
    }


def _first_difference(dumps: dict[int, Dump], name: str, begin: int, end: int) -> int:
    """The first position at which the ranks issued different collectives; `end + 1` without one."""
    found: dict[int, set[tuple[EventKind, int, int]]] = {}
    for dump in dumps.values():
        for each in dump.collectives:
            is_ordered = each.kind is not EventKind.POINT_TO_POINT
            if is_ordered and each.group == name and begin <= each.sequence <= end:
                size = 0 if each.kind is EventKind.ALL_TO_ALL else each.bytes
                found.setdefault(each.sequence, set()).add((each.kind, size, each.dtype))
    return min((at for at, kinds in found.items() if len(kinds) > 1), default=end + 1)


def _make_box(
    rank: int,
    dump: Dump,
    members: dict[str, tuple[int, ...]],
    begins: dict[str, int],
    ends: dict[str, int],
    header: Header,
) -> BlackBox:
    """The black box of a rank.

    Args:
        rank: The rank.
        dump: Its dump.
        members: The ranks of each group.
        begins: By group, the first position that all dumps have: digests begin there.
        ends: By group, the last position that all dumps have. Collectives after it cannot have
            finished. Used for dumps without the ends of collectives (gloo). Empty: the ends are
            known.
        header: The header of the box.
    """
    groups = {name: index for index, name in enumerate(sorted(members))}
    places: dict[CodePlace, int] = {}
    digests: dict[str, int] = {}
    rows: NDArray[np.void] = np.zeros(len(dump.collectives), ENTRY)
    for at, each in enumerate(dump.collectives):
        row = rows[at]
        if each.place is not None and len(places) < _MAX_PLACES:
            places.setdefault(each.place, len(places) + 1)
        is_ordered = each.kind is not EventKind.POINT_TO_POINT
        if is_ordered and each.sequence >= begins[each.group]:
            size = 0 if each.kind is EventKind.ALL_TO_ALL else each.bytes
            signature = (digests.get(each.group, 0), int(each.kind), each.unit, size, each.dtype)
            digests[each.group] = hash(signature) & (1 << 64) - 1
        finished = each.completed_ns
        if ends:
            finished = each.time_ns + 1 if each.sequence <= ends[each.group] else 0
        row["issued_ns"], row["finished_ns"] = each.time_ns, finished
        row["bytes"], row["dtype"], row["kind"] = each.bytes, each.dtype, each.kind
        row["digest"] = digests.get(each.group, 0)
        row["number"] = at + 1
        row["sequence"] = each.sequence if is_ordered else -1
        row["step"], row["unit"], row["phase"] = UNKNOWN_STEP, each.unit, each.phase
        row["place"] = 0 if each.place is None else places.get(each.place, 0)
        row["group"] = groups[each.group]
    return BlackBox(
        header,
        rows,
        {index: Communicator(name, members[name]) for name, index in groups.items()},
        {index: place for place, index in places.items()},
    )


# --- the run


def _general_notes() -> list[str]:
    return [
        "Flight recorder dumps hold the order of collectives, not units, steps, compute or memory. "
        "They cannot show that ranks exchanged two units of equal size."
    ]


def _note_of_units(units: NamedUnits, model: ModelParts) -> str:
    if not any(name.startswith(f"{model.blocks}.") for name in units.names):
        return (
            f"No message has the size of a block of the model ({model.blocks}), so blocks have no "
            "name. Check --model; other widths, tensor parallelism and DDP have other sizes."
        )
    return (
        "Units are inferred from the sizes of messages and of the model, and blocks from their "
        f"order in a pass. {model.blocks}.* is a block whose place is unknown."
    )


def _notes_of_times(dumps: dict[int, Dump]) -> list[str]:
    """Add a note if the times of the ranks do not overlap: the dumps may be of different runs."""
    first = {rank: dump.collectives[0].time_ns for rank, dump in dumps.items()}
    last = {rank: dump.collectives[-1].time_ns for rank, dump in dumps.items()}
    apart = [rank for rank in dumps if last[rank] < max(first.values())]
    if not apart:
        return []
    return [
        f"The dumps of rank {format_numbers(apart)} end before others begin: they may be of "
        "another run."
    ]
