"""`python -m fsdp_inspect_app RUNS_DIR` serves the dashboard until it is interrupted."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.server_access import (
    PROXY_HELP,
    TOKEN_HELP,
    choose_token,
    is_loopback,
    make_access,
    parse_origin,
    server_url,
)
from fsdp_inspect.store.files import is_url
from fsdp_inspect_app.launch import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    describe_exposure,
    pass_access,
    server_command,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace this process by the server, so that a signal to this process ends the server."""
    parser = _make_parser()
    chosen = parser.parse_args(arguments)
    if isinstance(chosen.runs_dir, Path) and not chosen.runs_dir.is_dir():
        parser.error(
            f"folder not found: {str(chosen.runs_dir)!r}. Expected a folder that holds recorded "
            "runs. Record one, or leave the folder out to see the samples."
        )
    try:
        command = _prepare(chosen)
    except FsdpInspectError as error:
        parser.error(str(error))
    os.execv(command[0], command)


def _prepare(chosen: argparse.Namespace) -> list[str]:
    """Print the URL, pass on the accepted requests, and return the server's command."""
    host, port, folder = chosen.host or DEFAULT_HOST, chosen.port, chosen.runs_dir
    proxy = None if chosen.proxy_name is None else parse_origin(chosen.proxy_name)
    token = choose_token(is_wanted=chosen.token, is_host_given=chosen.host is not None)
    if not is_loopback(host):
        exposure = describe_exposure(folder, host=host, port=port, has_token=token is not None)
        print(exposure, file=sys.stderr, flush=True)
    url = server_url(host, port, "/", proxy=proxy, token=token)
    print(
        f"Dashboard of {folder or 'the samples'}: {url} (ready in a few seconds, Ctrl-C ends it)",
        flush=True,
    )
    pass_access(make_access(host, port, proxy, token))
    return server_command(folder, host=host, port=port, proxy=proxy)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_inspect_app", description="Serve the dashboard of recorded runs."
    )
    parser.add_argument("runs_dir", nargs="?", type=_place, help="folder of runs, or its URL")
    parser.add_argument("--host", help="address (default: this machine only)")
    parser.add_argument(
        "--port", default=DEFAULT_PORT, type=int, help="port (default: %(default)s)"
    )
    parser.add_argument("--proxy-name", metavar="NAME", help=PROXY_HELP)
    parser.add_argument("--token", action=argparse.BooleanOptionalAction, help=TOKEN_HELP)
    return parser


def _place(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


if __name__ == "__main__":
    main()
