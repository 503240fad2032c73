"""Render results as JSON, with the names of their fields as keys."""

import json
from typing import Any

from fsdp_inspect.results import Result, to_plain
from fsdp_inspect.trace.run import RunSource


def render_json(result: object) -> str:
    """Render a result as JSON text, with keys in the order of its fields.

    NaN and infinity are not valid in JSON, so they become null.
    """
    return _dump(_plain(result))


def render_run_json(run: RunSource, result: object) -> str:
    """Render a result about one run as JSON text.

    The first keys are `run_id`, `source` (`recorded`, `emulated`, `imported`, `predicted`) and
    `notes` (missing or unusual data). The fields of the result follow. If the result has notes,
    they replace the notes of the run.
    """
    head = {
        "run_id": run.manifest.run_id,
        "source": run.manifest.source,
        "notes": list(run.notes),
    }
    return _dump({**head, **_plain(result)})


def _plain(result: object) -> Any:
    return result.to_dict() if isinstance(result, Result) else to_plain(result)


def _dump(plain: Any) -> str:
    return json.dumps(plain, indent=2, allow_nan=False)
