"""Read and append the prediction history of a folder of runs.

`predictions.jsonl` lies next to the runs. Each line is a prediction or an outcome. Lines are
appended under a lock and never changed. If a crash truncates a line, the next writer ends it.
Readers skip the truncated line and add a note.
"""

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from fsdp_inspect.errors import PredictionError
from fsdp_inspect.reading import parse_json, read_regular
from fsdp_inspect.simulation.predictions.records import (
    PREDICTION_VERSION,
    Ledger,
    Outcome,
    Prediction,
)

LEDGER_FILE = "predictions.jsonl"

_MAX_BYTES = 256 << 20
"""Larger histories are not read; a prediction has some kB."""

Entry = Prediction | Outcome
_KINDS: dict[str, type[Entry]] = {"prediction": Prediction, "outcome": Outcome}
_DAMAGED, _NEWER, _UNKNOWN = (
    "truncated or damaged",
    "from a newer version of fsdp-inspect",
    "of an unknown kind",
)


def find_ledger(run: Path) -> Path:
    """The path of a run's prediction history: next to it, or an existing one a folder above."""
    folders = run.absolute().parents[:2]
    places = [folder / LEDGER_FILE for folder in folders]
    return next((place for place in places if place.exists()), places[0])


def append_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Append to a prediction history. The file and its folder are created if missing.

    Raises:
        PredictionError: The file is not writable.
    """
    lines = b"".join(_encode(entry) for entry in entries)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file, _locked(file.fileno()):
            separator = b"" if _ends_with_line(file.fileno()) else b"\n"
            file.write(separator + lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise PredictionError(
            f"Cannot write the prediction history {str(path)!r}: {error.strerror or error}. "
            "Expected a writable folder of runs. Copy the runs to one."
        ) from error


def read_ledger(path: Path) -> Ledger:
    """Read all valid lines, with notes on the rest; a missing file is empty."""
    try:
        lines = read_regular(path, _MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return Ledger()
    except OSError as error:
        return Ledger(notes=(f"Cannot read {path}: {error.strerror or error}.",))
    entries: list[Entry] = []
    refused: Counter[str] = Counter()
    for line in filter(None, lines):
        entry = _decode(line)
        if isinstance(entry, str):
            refused[entry] += 1
        else:
            entries.append(entry)
    return Ledger(
        predictions=tuple(each for each in entries if isinstance(each, Prediction)),
        outcomes=tuple(each for each in entries if isinstance(each, Outcome)),
        notes=tuple(_say_refused(path, count, reason) for reason, count in refused.items()),
    )


def _say_refused(path: Path, count: int, reason: str) -> str:
    lines = "1 line" if count == 1 else f"{count} lines"
    return f"{lines} of {path.name} {'is' if count == 1 else 'are'} {reason} and ignored."


def _encode(entry: Entry) -> bytes:
    kind = next(name for name, cls in _KINDS.items() if isinstance(entry, cls))
    fields = entry.model_dump(mode="json")
    line = {"kind": kind, "schema_version": entry.schema_version, "entry": fields}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Entry | str:
    """An entry, or the reason why the line is invalid."""
    try:
        fields = parse_json(line)
        version, kind, entry = fields["schema_version"], fields["kind"], fields["entry"]
        if version > PREDICTION_VERSION:
            return _NEWER
        if kind not in _KINDS:
            return _UNKNOWN
        return _KINDS[kind].model_validate(entry)
    except (ValueError, TypeError, KeyError, ValidationError):
        return _DAMAGED


def _ends_with_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Lock the file. Some network file systems have no locks, but appends are whole there too."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
