"""What is missing or odd in this run? One sentence each."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.store.schema import TableT
from fsdp_inspect.store.streams import StreamContents
from fsdp_inspect.trace.run import RankRecord, RunStatus

_MAX_PROBLEMS = 10


@contextmanager
def noting(found: dict[str, None]) -> Iterator[None]:
    """Turn a damaged file into a note, so that the rest of the run stays usable."""
    try:
        yield
    except StoreError as error:
        found[str(error)] = None


def describe_ranks(numbers: Sequence[int]) -> str:
    """Ranks as text: `rank 2`, `ranks 0-3, 7`."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {format_numbers(numbers)}"


def note_missing(missing: Sequence[int], world_size: int) -> list[str]:
    """Ranks that wrote nothing here."""
    if not missing:
        return []
    return [
        f"{_capital(describe_ranks(missing))} of world size {world_size} "
        f"{'is' if len(missing) == 1 else 'are'} missing: nothing of "
        f"{'it' if len(missing) == 1 else 'them'} lies in this folder."
    ]


def note_ends(records: Sequence[RankRecord], last_signs: Mapping[int, int]) -> list[str]:
    """Ranks that failed, or died without a word.

    Args:
        records: All ranks.
        last_signs: When each crashed rank last wrote, wall time in ns.
    """
    notes = [
        f"Rank {record.rank} failed: {record.failure or 'it did not say why'}."
        for record in records
        if record.status is RunStatus.FAILED
    ][:_MAX_PROBLEMS]
    crashed = [record for record in records if record.status is RunStatus.CRASHED]
    if crashed:
        latest = max(last_signs[record.rank] for record in crashed)
        lost = max(record.flush_interval_s for record in crashed)
        notes.append(
            f"{_capital(describe_ranks([record.rank for record in crashed]))} stopped without "
            f"saying so, last heard of at {_wall_time(latest)}; at most the last {lost:g} s of "
            "recording are lost."
        )
    return notes


def note_losses(records: Sequence[RankRecord]) -> list[str]:
    """What the writers say that they could not write, and why; the same of several ranks once."""
    notes: list[str] = []
    reporting: dict[str, list[int]] = {}
    for record in records:
        dropped = ", ".join(
            f"{rows} {'row' if rows == 1 else 'rows'} of {table}"
            for table, rows in record.dropped.items()
            if rows
        )
        if dropped:
            notes.append(f"Rank {record.rank} dropped {dropped}.")
        for problem in dict.fromkeys(record.problems):
            reporting.setdefault(problem, []).append(record.rank)
    notes += [
        f"{_capital(describe_ranks(ranks))} {'reports' if len(ranks) == 1 else 'report'}: "
        f"{problem.rstrip('.')}."
        for problem, ranks in reporting.items()
    ]
    if len(notes) > _MAX_PROBLEMS:
        hidden = len(notes) - _MAX_PROBLEMS
        return [*notes[:_MAX_PROBLEMS], f"{hidden} more such reports are in the rank.json files."]
    return notes


def note_stream(
    record: RankRecord | None, rank: int, name: str, stream: StreamContents[TableT]
) -> list[str]:
    """What reading a live table brought to light.

    Args:
        record: The rank's record, if there is one.
        rank: Its number.
        name: The file's name.
        stream: What was read.
    """
    notes = []
    if stream.missing_rows:
        notes.append(
            f"Rank {rank} dropped {stream.missing_rows} rows in the middle of {name}: the numbers "
            "of its rows have gaps."
        )
    ended = record is not None and record.status in (RunStatus.COMPLETE, RunStatus.FAILED)
    if ended and not stream.is_closed:
        notes.append(
            f"{name} of rank {rank} was never closed though the rank ended: it is cut off after "
            f"{len(stream.table)} rows."
        )
    elif stream.torn_bytes and not (record and record.status is RunStatus.RUNNING):
        notes.append(
            f"The last {stream.torn_bytes} bytes of {name} of rank {rank} are an unfinished "
            f"write; the {len(stream.table)} rows before it are whole."
        )
    return notes


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wall_time(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
