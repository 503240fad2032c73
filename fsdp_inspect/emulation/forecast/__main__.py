"""Run forecasts for `fsdp-inspect plan memory`, which never imports torch itself.

Each line of standard input is a job: a JSON object with the arguments of `forecast_memory`. The
builder's name is resolved from the current folder. Each line of standard output is the answer to
one job; before it come lines `{"progress": ...}`. Output of a builder goes to standard error. The
process ends with its input.
"""

import gc
import json
import os
import sys
import time
from typing import Any, TextIO

from fsdp_inspect.emulation.forecast.forecast import forecast_memory
from fsdp_inspect.emulation.forecast.target import accepted_settings, find_builder
from fsdp_inspect.errors import FsdpInspectError


def main() -> None:
    """Answer jobs until the end of the input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Full collections visit all objects of torch and of the model: a twentieth of a large forecast.
    # Young garbage is collected as usual, and all of it before the step that is tracked.
    gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)
    for line in sys.stdin:
        _answer(answers, _run(json.loads(line), answers))


def _run(job: dict[str, Any], answers: TextIO) -> dict[str, Any]:
    started = time.monotonic()
    try:
        builder = find_builder(job["builder"])
        if job["path"] is None:
            return {"accepted": accepted_settings(builder)}
        forecast_memory(
            builder,
            job["path"],
            world_size=job["world_size"],
            gpus_per_node=job["gpus_per_node"],
            device_type=job["device_type"],
            settings=job["settings"],
            report=lambda text: _answer(answers, {"progress": text}),
        )
    except FsdpInspectError as error:
        return {"error": str(error)}
    return {"seconds": time.monotonic() - started}


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
