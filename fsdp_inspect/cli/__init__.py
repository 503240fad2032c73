"""The `fsdp-inspect` command. Only this package prints and exits.

Exit codes: 0 success, 1 an error with a message, 2 an invalid command line, 130 Ctrl-C. Commands
that judge (`check`, `diagnose`, `equivalence`, `plan`) exit with 1 for a finding only. All their
errors have the exit code 2. A subcommand imports its modules when it runs, so `--help` is fast.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence

from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import show_controls

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
FAILED = 1
"""Exit code of an error."""
UNJUDGED = 2
"""Exit code of an error in a command that judges, where 1 means a finding."""
JUDGING = frozenset({"check", "diagnose", "equivalence", "forecast", "plan"})
TRACEBACK = "--traceback"


def main() -> None:
    """Run the command line and exit."""
    from fsdp_inspect.cli.application import build_command
    from fsdp_inspect.cli.download_line import show_downloads

    _replace_unprintable()
    show_downloads()
    words = _options_of(sys.argv[1:])
    try:
        build_command()(prog_name="fsdp-inspect")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Redirect stdout, or the flush at exit raises.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Exception as error:
        if TRACEBACK in words:
            traceback.print_exc()
        print(show_controls(f"fsdp-inspect: {_describe(error)}"), file=sys.stderr)
        command = next((word for word in words if not word.startswith("-")), None)
        sys.exit(UNJUDGED if command in JUDGING else FAILED)


def _options_of(words: Sequence[str]) -> list[str]:
    """The words before `--`, after which another program's command begins."""
    return list(words[: words.index("--")] if "--" in words else words)


def _describe(error: Exception) -> str:
    """Describe an error in one line: the problem, the expected value and the remedy."""
    if isinstance(error, FsdpInspectError):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            "out of memory. Expected a run that fits into the free memory of this machine. Close "
            "other programs, select fewer ranks, or use a machine with more memory."
        )
    if isinstance(error, OSError):
        place = "" if error.filename is None else f" {str(error.filename)[:200]!r}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return (
                f"Cannot write{place}: {error.strerror}. Expected free space. Free some, or write "
                "to another disk; a run's disk also needs some for what is derived from it."
            )
        return (
            f"Cannot access{place}: {error.strerror or error}. Expected an accessible file or "
            "folder. Check its name, its type and its permissions."
        )
    reason = shorten(" ".join(str(error).split()))
    return (
        f"internal error: {type(error).__name__}{f': {reason}' if reason else ''}. This is a "
        f"defect of fsdp-inspect, not of your training. Run the command again with {TRACEBACK}, "
        "and attach the output to a bug report."
    )


def _replace_unprintable() -> None:
    """Write characters that the terminal's encoding lacks as escapes, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
