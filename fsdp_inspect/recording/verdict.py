"""Print the run's verdict at the end, from a child process on rank 0.

Recording and analysis share only the run folder, so this module runs the `summary` command. A
failure of that command cannot affect the training, which is already over.
"""

import subprocess
import sys
from pathlib import Path

_TIMEOUT_S = 60.0


def print_verdict(run_folder: Path, emulated: str | None = None) -> None:
    """Print on stderr what limits the step, why, and what to try next.

    Args:
        run_folder: The finished recording.
        emulated: The emulated ranks and links; None for real ranks.
    """
    result = run_command("summary", str(run_folder), "--verdict")
    if result is None:
        return
    text = result.stdout if result.returncode == 0 else result.stderr
    if text.strip():
        if emulated is not None:
            text = f"Emulated, not real ranks ({emulated}).\n{text}"
        print(text.rstrip(), file=sys.stderr, flush=True)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of `fsdp-inspect` in a child process; None if it fails to run or to end."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "fsdp_inspect", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
