"""Which predictions were made of the runs in this folder, and what became of them?

`predictions.jsonl` lies with the runs: one line a prediction or an outcome, appended and never
changed. A line is written at once under a lock, so that writers do not mix; one that was cut off by
a crash is closed by the next writer, and passed over by readers, who say so.
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
from fsdp_inspect.predictions.records import PREDICTION_VERSION, Ledger, Outcome, Prediction

LEDGER_FILE = "predictions.jsonl"

Entry = Prediction | Outcome
_KINDS: dict[str, type[Entry]] = {"prediction": Prediction, "outcome": Outcome}
_DAMAGED, _NEWER, _UNKNOWN = (
    "cut off or damaged",
    "written by a newer version of fsdp-inspect",
    "of a kind that this version does not know",
)


def find_ledger(run: Path) -> Path:
    """Where the ledger of a run lies: beside it, or one folder above where there is one already."""
    folders = run.absolute().parents[:2]
    places = [folder / LEDGER_FILE for folder in folders]
    return next((place for place in places if place.exists()), places[0])


def append_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Add to a ledger; it is made with its folder where there is none.

    Raises:
        PredictionError: It cannot be written.
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
            f"The ledger {str(path)!r} cannot be written: {error.strerror or error}. Expected a "
            "folder of runs that this user may write to. Copy the runs to one."
        ) from error


def read_ledger(path: Path) -> Ledger:
    """All of a ledger that can be read, with notes on the rest; one that is not there is empty."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return Ledger()
    except OSError as error:
        return Ledger(notes=(f"{path} cannot be read ({error.strerror or error}).",))
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
    return f"{lines} of {path.name} {'is' if count == 1 else 'are'} {reason}, and left out."


def _encode(entry: Entry) -> bytes:
    kind = next(name for name, cls in _KINDS.items() if isinstance(entry, cls))
    fields = entry.model_dump(mode="json")
    line = {"kind": kind, "schema_version": entry.schema_version, "entry": fields}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Entry | str:
    """An entry, or why there is none."""
    try:
        fields = json.loads(line)
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
    """Alone with the file; some network disks know no locks, and an append is whole there too."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
