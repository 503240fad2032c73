"""Describe missing and unusual data of a run, one note for each problem."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import capitalize, format_ranks, plural
from fsdp_inspect.store.schema import EVENTS, TableFile, TableT
from fsdp_inspect.store.streams import StreamContents
from fsdp_inspect.trace.run import RankRecord, RunStatus

_MAX_PROBLEMS = 10


@contextmanager
def noting(found: dict[str, None]) -> Iterator[None]:
    """Turn the error of a damaged file into a note, so that the rest of the run stays usable."""
    try:
        yield
    except StoreError as error:
        found[str(error)] = None


def describe_rows(numbers: Mapping[str, int]) -> str:
    """Numbers of rows by table as text: `8 rows of events, 1 row of memory`; empty for none."""
    return ", ".join(f"{plural(rows, 'row')} of {table}" for table, rows in numbers.items() if rows)


def note_missing(missing: Sequence[int], world_size: int) -> list[str]:
    """Note the ranks without data in this folder."""
    if not missing:
        return []
    return [
        f"{capitalize(format_ranks(missing))} of world size {world_size} "
        f"{'is' if len(missing) == 1 else 'are'} missing: this folder has no data of "
        f"{'it' if len(missing) == 1 else 'them'}."
    ]


def note_ends(records: Sequence[RankRecord], last_signs: Mapping[int, int]) -> list[str]:
    """Note the ranks that failed or have no end: first the own errors, last the lost peers.

    Args:
        records: All ranks.
        last_signs: Time of the last write of each rank without an end, wall time in ns.
    """
    failed = [record for record in records if record.status is RunStatus.FAILED]
    failed.sort(key=lambda record: (record.failed_unix_ns, record.rank))
    notes = [
        f"Rank {record.rank} failed: {(record.failure or 'unknown error').rstrip('.')}."
        for record in failed
        if not record.lost_peer
    ][:_MAX_PROBLEMS]
    left = _MAX_PROBLEMS - len(notes)
    unended = [record for record in records if record.status is RunStatus.CUT_OFF]
    if unended:
        latest = max(last_signs[record.rank] for record in unended)
        lost = max(record.flush_interval_s for record in unended)
        notes.append(
            f"{capitalize(format_ranks([record.rank for record in unended]))} stopped without "
            f"a recorded end. The last write was at {_wall_time(latest)}. The rows "
            f"of about {lost:g} s before the end are lost, or more if the machine was too busy or "
            "the disk had failed."
        )
    notes += [
        f"Rank {record.rank} failed after it lost another rank, or waited too long for it: "
        f"{(record.failure or '').rstrip('.')}."
        for record in failed
        if record.lost_peer
    ][:left]
    return notes


def note_deleted(record: RankRecord, file: TableFile[TableT]) -> str | None:
    """Note that a table that the rank recorded is not in its folder; None: it recorded none."""
    if file.name not in record.tables and not (file is EVENTS and record.num_steps):
        return None
    return (
        f"Rank {record.rank} recorded a table of {file.name} that is not in its folder. Numbers "
        f"that need it are missing, 0 or of the other ranks. Copy {file.compacted_name} into the "
        "folder again."
    )


def note_step_counts(records: Sequence[RankRecord]) -> list[str]:
    """Note the ranks that ended normally after another number of steps than most ranks."""
    complete = [record for record in records if record.status is RunStatus.COMPLETE]
    counts = Counter(record.num_steps for record in complete)
    if len(counts) < 2:
        return []
    (usual, number), *_ = counts.most_common(1)
    others = [
        f"{format_ranks([each.rank for each in complete if each.num_steps == count])}: {count}"
        for count in sorted(counts)
        if count != usual
    ]
    return [
        f"The ranks completed different numbers of steps. {number} of {len(complete)} ranks: "
        f"{usual}; {'; '.join(others)}."
    ]


def note_losses(records: Sequence[RankRecord]) -> list[str]:
    """Note the rows that ranks dropped and the problems that they reported, equal ones once."""
    notes: list[str] = []
    reporting: dict[str, list[int]] = {}
    for record in records:
        dropped = describe_rows(record.dropped)
        if dropped:
            notes.append(f"Rank {record.rank} dropped {dropped}.")
        for problem in dict.fromkeys(record.problems):
            reporting.setdefault(problem, []).append(record.rank)
    notes += [
        f"{capitalize(format_ranks(ranks))} {'reports' if len(ranks) == 1 else 'report'}: "
        f"{problem.rstrip('.')}."
        for problem, ranks in reporting.items()
    ]
    if len(notes) > _MAX_PROBLEMS:
        hidden = len(notes) - _MAX_PROBLEMS
        return [*notes[:_MAX_PROBLEMS], f"The rank.json files contain {hidden} more reports."]
    return notes


def note_stream(
    record: RankRecord | None, rank: int, name: str, stream: StreamContents[TableT]
) -> list[str]:
    """Note missing rows and unfinished writes of a live table.

    Args:
        record: The rank's record, if it is readable.
        rank: The number of the rank.
        name: The file's name.
        stream: The contents of the file.
    """
    notes = []
    if stream.missing_rows:
        notes.append(
            f"Rank {rank} dropped {stream.missing_rows} rows in the middle of {name}: its row "
            "numbers have gaps."
        )
    ended = record is not None and record.status in (RunStatus.COMPLETE, RunStatus.FAILED)
    if ended and not stream.is_closed:
        notes.append(
            f"{name} of rank {rank} is cut off after {len(stream.table)} rows: the rank ended, but "
            "the file has no end mark."
        )
    elif stream.torn_bytes and not (record and record.status is RunStatus.RUNNING):
        notes.append(
            f"The last {stream.torn_bytes} bytes of {name} of rank {rank} are an unfinished "
            f"write. The {len(stream.table)} rows before it are complete."
        )
    return notes


def note_numerics(rank: int, content: bytes, num_decoded: int, *, is_cut: bool) -> list[str]:
    """Note the lines of a numerics file that are damaged, foreign or beyond the limit of its size.

    A line without its end, of a process that was killed, is no damage.
    """
    lines = [line for line in content.split(b"\n")[:-1] if line.strip()]
    notes = []
    if len(lines) > num_decoded:
        number = len(lines) - num_decoded
        notes.append(
            f"{plural(number, 'line')} of numerics.jsonl of rank {rank} "
            f"{'is' if number == 1 else 'are'} damaged or of another recording: these numerics "
            "steps are missing."
        )
    if is_cut:
        notes.append(
            f"numerics.jsonl of rank {rank} is very large: only its first numerics steps are read."
        )
    return notes


def _wall_time(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
