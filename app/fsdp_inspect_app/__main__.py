"""`python -m fsdp_inspect_app RUNS_DIR` serves the dashboard until it is interrupted."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_inspect_app.launch import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    describe_exposure,
    is_loopback,
    server_command,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Become the server process, so that a signal to this process ends the server."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_inspect_app", description="Serve the dashboard of recorded runs."
    )
    parser.add_argument("runs_dir", nargs="?", type=Path, help="folder of runs; default: samples")
    parser.add_argument("--host", default=DEFAULT_HOST, help="address (default: this machine only)")
    parser.add_argument(
        "--port", default=DEFAULT_PORT, type=int, help="port (default: %(default)s)"
    )
    parser.add_argument("--proxy-name", help="host name of a proxy that is put in front of it")
    chosen = parser.parse_args(arguments)
    if chosen.runs_dir is not None and not chosen.runs_dir.is_dir():
        parser.error(
            f"there is no folder {str(chosen.runs_dir)!r}. Expected a folder that holds recorded "
            "runs. Record one, or leave the folder out to see the samples."
        )
    if not is_loopback(chosen.host):
        exposure = describe_exposure(chosen.runs_dir, host=chosen.host, port=chosen.port)
        print(exposure, file=sys.stderr, flush=True)
    command = server_command(
        chosen.runs_dir, host=chosen.host, port=chosen.port, proxy_name=chosen.proxy_name
    )
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
