"""Show unit, phase and line of each rank on torch's debug page.

    from torch.distributed.debug import start_debug_server
    if __name__ == "__main__":  # the server's process imports the script
        handlers = fsdp_inspect.debug_handlers("runs/llama-1b")
        start_debug_server(handlers=handlers, start_method="spawn")

The page reads the run folder for each request, as `fsdp-inspect diagnose` does. It asks no rank, so
it works while all ranks hang, and costs the training nothing.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import FsdpInspectError, RecordingError


def debug_handlers(path: str | Path) -> list[Any]:
    """Torch's own pages, and a page with the state of the ranks of a run.

    Args:
        path: The folder that the recorder writes: `recorder.path`. On rank 0 only.

    Returns:
        The value of `handlers` of `torch.distributed.debug.start_debug_server`.

    Raises:
        RecordingError: This torch has no such page, or a package that it needs is missing.
    """
    try:
        from fsdp_inspect.recording.torch_api.debug_page import add_page
    except ImportError as error:
        raise RecordingError(
            f"Torch's debug page cannot be used: {error}. Expected torch.distributed.debug as in "
            "torch 2.13, with jinja2 and tabulate. Install them, or start the server without "
            "handlers."
        ) from error
    return add_page(partial(describe_ranks, str(path)))


def describe_ranks(path: str) -> str:
    """The diagnosis of a run, and the step, phase, unit and line of each rank."""
    from rich.console import Console

    from fsdp_inspect.report.diagnosis import render_diagnosis, render_states
    from fsdp_inspect.run import open_run

    try:
        found = open_run(path).diagnose(with_plans=False)
    except (FsdpInspectError, OSError) as error:
        return f"{error}"
    text = io.StringIO()
    page = Console(file=text, width=160)
    page.print(render_diagnosis(found, brief=True, run=path), "", render_states(found))
    return text.getvalue()
