"""Print the verdict of a run, or the reason of its failure, from a child process.

Recording and analysis share only the run folder, so this module runs the `summary` and `diagnose`
commands. A failure of a command cannot affect the training, which has already ended.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

EXPLAINED_FILE = "explained"
"""A file next to the folders of the ranks: the run's end, or a hang, is explained on stderr."""
_TIMEOUT_S = 60.0
_DIAGNOSIS_S = 15.0
"""The time that a rank that failed waits for the diagnosis."""


def print_verdict(run_folder: Path, emulated: str | None = None) -> None:
    """Print on stderr the limit of the step, its reason, and what to try next.

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


def claim_explanation(rank_folder: Path) -> bool:
    """Whether this rank is the first of the run to explain its end or a hang."""
    try:
        with (rank_folder.parent / EXPLAINED_FILE).open("x"):
            return True
    except OSError:  # another rank was first, or the disk is gone
        return False


def print_diagnosis_of_failure(run_folder: Path) -> None:
    """Print the reason of a failed training on stderr, as far as the ranks show it.

    The child has its own session and prints directly. A launcher that ends this process meanwhile
    does not end the explanation.

    Args:
        run_folder: The recording, in which some ranks may still be running.
    """
    command = [sys.executable, "-m", "fsdp_inspect", "diagnose", str(run_folder)]
    with contextlib.suppress(OSError, AttributeError, subprocess.SubprocessError):
        child = subprocess.Popen(
            [*command, "--brief", "--at-end"],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        child.wait(_DIAGNOSIS_S)


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
