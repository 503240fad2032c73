"""Write result objects as JSON: their own fields, nothing renamed."""

import json
from typing import Any

from fsdp_inspect.results import to_plain
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
