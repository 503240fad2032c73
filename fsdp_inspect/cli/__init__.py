"""The `fsdp-inspect` command, with one file per subcommand. Only this package prints and exits.

Exit codes: 0 success, 1 an error with a message, 2 an invalid command line, 130 Ctrl-C. A
subcommand imports its modules when it runs, so `--help` is fast.
"""

import os
import sys

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import show_controls

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


def main() -> None:
    """Run the command line and exit."""
    from fsdp_inspect.cli.application import build_application

    try:
        build_application()(prog_name="fsdp-inspect")
    except FsdpInspectError as error:
        print(show_controls(f"fsdp-inspect: {error}"), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Redirect stdout, or the flush at exit raises.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
