"""Start the dump in a process of the user's command, before its script runs.

`fsdp-inspect equivalence` puts a `sitecustomize` module on the path of the command, which calls
`start` in every Python process. Nothing happens until a process imports torch.
"""

from __future__ import annotations

import os
import sys

from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.trace.step_dump import ENVIRONMENT_VARIABLE, DumpSettings

_is_started = False


def start() -> None:
    """Dump the step that the environment variable names; does nothing without it, or twice."""
    global _is_started
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text and "RANK" in os.environ and not _is_started:
        _is_started = True
        settings = DumpSettings.decode(text)
        call_after_import("torch", lambda: _install(settings))


def _install(settings: DumpSettings) -> None:
    try:
        from fsdp_inspect.recording.equivalence.dumping import install_dump

        install_dump(settings)
    except Exception as error:
        print(f"fsdp_inspect: the step cannot be dumped: {error!r}.", file=sys.stderr, flush=True)
        raise
