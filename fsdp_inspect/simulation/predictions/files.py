"""Write and read prediction files."""

from pathlib import Path

from pydantic import ValidationError

from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import PredictionError
from fsdp_inspect.reading import MAX_JSON_BYTES, InvalidTextError, parse_json, read_regular
from fsdp_inspect.simulation.predictions.records import (
    PREDICTION_FORMAT,
    PREDICTION_VERSION,
    Prediction,
)
from fsdp_inspect.store.records import replace_file

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
