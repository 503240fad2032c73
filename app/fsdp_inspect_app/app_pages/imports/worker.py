"""Run one import: `python -m fsdp_inspect_app.app_pages.imports.worker KIND PATH OUT NAME BY_STEP`.

The import runs in a separate process, so that a large file neither blocks the dashboard nor takes
its memory. Each line on stdout is a JSON object: `{"file": ..., "share": ...}` during the import,
and `{"run": ..., "notes": [...]}` or `{"error": ...}` at the end. The process ends at SIGTERM, or
when its stdin closes because the dashboard has ended. A stopped import leaves no files.
"""

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.importing.snapshot import import_snapshot

SNAPSHOT, TRACE = "snapshot", "trace"


def main(arguments: list[str]) -> None:
    """Run the import and print its progress."""
    kind, path, out, name, by_step = arguments
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_watch_parent, daemon=True).start()
    try:
        if kind == SNAPSHOT:
            notes = import_snapshot(Path(path), Path(out)).notes
        else:
            notes = import_traces(
                Path(path),
                Path(out),
                name=name,
                by_step=None if by_step == "1" else False,
                on_progress=lambda file, share: _say(file=file, share=round(share, 3)),
            ).notes
        _say(run=Path(out).name, notes=list(notes))
    except FsdpInspectError as error:
        _say(error=str(error))
    except MemoryError:
        _say(
            error=f"{Path(path).name} does not fit into the memory of this machine. Expected a "
            "trace of a few steps. Profile fewer steps, or import it on a larger machine."
        )
    except Exception as error:
        traceback.print_exc()
        _say(error=f"The importer itself failed: {type(error).__name__}: {error}.")


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _watch_parent() -> None:
    """End this process when stdin closes, because the dashboard closed it or ended."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
