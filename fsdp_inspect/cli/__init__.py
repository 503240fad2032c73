"""The `fsdp-inspect` command. One file a subcommand; only this package prints and exits.

Exit codes: 0 done, 1 an error that the message explains, 2 a wrong command line, 130 Ctrl-C.
Whatever a subcommand needs is imported when it runs, so that `--help` and errors come at once.
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
        # The reader has gone (`| head`). Point stdout away, or the interpreter's own flush at
        # exit complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
