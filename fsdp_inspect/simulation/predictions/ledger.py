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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import PredictionError
from fsdp_inspect.formatting import format_ratio, plural
from fsdp_inspect.reading import MAX_JSON_BYTES, InvalidTextError, parse_json, read_regular
from fsdp_inspect.simulation.predictions.records import (
    PREDICTION_FORMAT,
    PREDICTION_VERSION,
    Ledger,
    Outcome,
    Prediction,
    Ruling,
)
from fsdp_inspect.writing import replace_file

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
    lines = plural(count, "line")
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


# --- Sum up the outcomes of earlier predictions from the prediction history.
#
# The last outcome of a prediction counts.


@dataclass(frozen=True, slots=True)
class VerifiedPrediction:
    """A prediction and its outcome."""

    prediction: Prediction
    outcome: Outcome | None
    """None: the plan has not been verified yet."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts and errors of predictions."""

    num_predictions: int

    num_verified: int
    """Held or did not hold. Not significant, failed and pending predictions do not count."""
    num_held: int
    num_untold: int
    num_failed: int
    median_step_error: float | None
    """Median of |step_error| over all measured predictions; None without one."""
    median_memory_error: float | None


@dataclass(frozen=True, slots=True)
class TallyOfChange:
    """The tally of predictions that changed one setting, possibly among others."""

    change: str
    """A setting of plans; `units`: the cut of the model."""
    tally: Tally


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """The outcomes of the predictions in one history."""

    sentence: str
    """Empty without predictions."""
    tally: Tally
    by_change: tuple[TallyOfChange, ...]
    """One tally for each requested setting."""
    predictions: tuple[VerifiedPrediction, ...]
    """Newest first."""
    notes: tuple[str, ...]
    """Notes on unreadable lines of the history."""


def measure_track_record(
    ledger: Ledger, *, run_ids: Collection[str] | None = None, changes: Collection[str] = ()
) -> TrackRecord:
    """Sum up a prediction history.

    Args:
        ledger: The prediction history of a folder of runs.
        run_ids: Only predictions from the baseline with these names; None: all. The Advice page of
            the dashboard uses it for the outcomes of a run's suggestions.
        changes: Settings with a separate tally (`Prediction.changes`).
    """
    last = {outcome.prediction_id: outcome for outcome in ledger.outcomes}
    made = {each.prediction_id: each for each in ledger.predictions}
    found = [
        VerifiedPrediction(prediction, last.get(prediction.prediction_id))
        for prediction in made.values()
        if run_ids is None or prediction.run_id in run_ids
    ]
    found.sort(key=lambda each: -each.prediction.created_unix_ns)
    tally = _tally(found)
    by_change = tuple(
        TallyOfChange(change, _tally(own))
        for change in changes
        if (own := [each for each in found if change in each.prediction.changes])
    )
    return TrackRecord(
        sentence=_say(tally, by_change) if found else "",
        tally=tally,
        by_change=by_change,
        predictions=tuple(found),
        notes=ledger.notes,
    )


def _tally(found: Sequence[VerifiedPrediction]) -> Tally:
    outcomes = [each.outcome for each in found if each.outcome is not None]
    count = {ruling: sum(each.ruling is ruling for each in outcomes) for ruling in Ruling}
    return Tally(
        num_predictions=len(found),
        num_verified=count[Ruling.HELD] + count[Ruling.DID_NOT_HOLD],
        num_held=count[Ruling.HELD],
        num_untold=count[Ruling.CANNOT_BE_TOLD],
        num_failed=count[Ruling.FAILED],
        median_step_error=_middle([each.step_error for each in outcomes]),
        median_memory_error=_middle([each.memory_error for each in outcomes]),
    )


def _middle(errors: Sequence[float | None]) -> float | None:
    """The median absolute error; None without a known error."""
    sizes = sorted(abs(error) for error in errors if error is not None)
    if not sizes:
        return None
    half = len(sizes) // 2
    return sizes[half] if len(sizes) % 2 else (sizes[half - 1] + sizes[half]) / 2


def _say(tally: Tally, by_change: Sequence[TallyOfChange]) -> str:
    parts = [f"{tally.num_held} of {tally.num_verified} verified predictions held here"]
    if not tally.num_verified:
        parts = ["No prediction could be judged yet"]
    if tally.num_untold:
        more = " more" if tally.num_verified else ""
        parts.append(f"{tally.num_untold}{more} not significant")
    if tally.num_failed:
        parts.append(f"{tally.num_failed} did not run to completion")
    if tally.median_step_error is not None:
        parts.append(f"median error {format_ratio(tally.median_step_error)} of the step")
    apart = [
        f"{each.change} {each.tally.num_held} of {each.tally.num_verified}"
        for each in by_change
        if each.tally.num_verified
    ]
    return f"{'; '.join(parts)}.{' By change: ' + ', '.join(apart) + '.' if apart else ''}"


# --- Write and read prediction files.

_HOW_TO_WRITE = "Write one with `fsdp-inspect simulate RUN ... --write-prediction FILE`"


def prediction_file_of(plan_file: Path) -> Path:
    """The prediction file of a plan file: `plan.prediction.json` next to `plan.toml`."""
    return plan_file.with_name(f"{plan_file.stem}.prediction.json")


def write_prediction(prediction: Prediction, path: Path) -> None:
    """Write a prediction file. An existing file is replaced atomically.

    Raises:
        PredictionError: The path is not writable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{prediction.model_dump_json(indent=1)}\n".encode())
    except OSError as error:
        raise PredictionError(
            f"Cannot write the prediction to {str(path)!r}: {error.strerror or error}. "
            "Expected a writable path. Choose another file."
        ) from error


def read_prediction(path: Path) -> Prediction:
    """Read a prediction file.

    Raises:
        PredictionError: The file is missing, is not a prediction, has a newer schema version, or
            contains an invalid value. The message names the problem.
    """
    try:
        encoded = read_regular(path, MAX_JSON_BYTES)
    except OSError as error:
        raise PredictionError(
            f"Cannot read a prediction from {str(path)!r}: {error.strerror or error}. Expected a "
            f"prediction file. {_HOW_TO_WRITE}."
        ) from error
    fields = _fields_of(encoded, path)
    version = fields.get("schema_version")
    if isinstance(version, int) and version > PREDICTION_VERSION:
        raise PredictionError(
            f"The prediction {str(path)!r} has schema version {version}. This fsdp-inspect reads "
            f"up to version {PREDICTION_VERSION}. Update fsdp-inspect."
        )
    try:
        return Prediction.model_validate(fields)
    except ValidationError as error:
        raise PredictionError(
            f"Invalid prediction {str(path)!r}: {describe_validation_error(error)} "
            f"Restore the file, or write it again: {_HOW_TO_WRITE[0].lower()}{_HOW_TO_WRITE[1:]}."
        ) from error


def _fields_of(encoded: bytes, path: Path) -> dict[str, object]:
    try:
        fields = parse_json(encoded)
    except InvalidTextError as error:
        sibling = prediction_file_of(path)
        hint = f" Did you mean {str(sibling)!r}?" if sibling.exists() and sibling != path else ""
        raise PredictionError(
            f"{str(path)!r} is not JSON ({error}). Expected a prediction.{hint} {_HOW_TO_WRITE}."
        ) from error
    if not isinstance(fields, dict) or fields.get("format") != PREDICTION_FORMAT:
        raise PredictionError(
            f"Invalid prediction {str(path)!r}: its format is not {PREDICTION_FORMAT!r}. Expected "
            f"a prediction. {_HOW_TO_WRITE}."
        )
    return fields
