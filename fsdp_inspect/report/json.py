"""How does a result read for programs? The result object's own fields as JSON, nothing renamed."""

import json
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fsdp_inspect.trace.run import RunSource


def render_json(result: object) -> str:
    """A result object as JSON text, keys in the order of its fields.

    A value that JSON does not know (a loss of NaN or infinity) is null, so that every parser reads
    the output.
    """
    return _dump(to_plain(result))


def render_run_json(run: RunSource, result: object) -> str:
    """What was asked about one run as JSON text.

    Every command begins alike: `run_id`, `source` (`recorded`, `emulated`, `imported`,
    `predicted`) and `notes` (what is missing or odd); then the result's own fields. Notes of the
    result win, which may know more than those of the run.
    """
    head = {
        "run_id": run.manifest.run_id,
        "source": run.manifest.source,
        "notes": list(run.notes),
    }
    return _dump({**head, **to_plain(result)})


def _dump(plain: Any) -> str:
    return json.dumps(plain, indent=2, allow_nan=False)


def to_plain(value: object) -> Any:
    """A result as dictionaries, lists, text and numbers, with None for what JSON cannot say."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, BaseModel):
        return to_plain(value.model_dump(mode="json"))
    if isinstance(value, dict):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
