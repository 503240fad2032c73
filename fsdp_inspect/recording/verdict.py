"""What limited the run? At the end rank 0 asks the analysis, in a process of its own.

Recording and analysis meet in the run folder only, so the question is put to the command line:
whatever happens there cannot hurt the training, which is over by then anyway.
"""

import subprocess
import sys
from pathlib import Path

_ASK_TIMEOUT_S = 60.0


def print_verdict(run_folder: Path, emulated: str | None = None) -> None:
    """Print on stderr what limits the step, why, and what to try next.

    Args:
        run_folder: The finished recording.
        emulated: The ranks and links that stood in place of real ones, if they did.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "fsdp_inspect", "summary", str(run_folder), "--verdict"],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return
    text = answer.stdout if answer.returncode == 0 else answer.stderr
    if text.strip():
        if emulated is not None:
            text = f"Emulated, not real ranks ({emulated}).\n{text}"
        print(text.rstrip(), file=sys.stderr, flush=True)
