"""`fsdp-inspect app`: serve the dashboard in a browser."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fsdp_inspect.alert_rules import ALERT_HELP, ALERT_IF_HELP, ALERTS_VARIABLE, AlertTarget
from fsdp_inspect.cli.arguments import whole_number
from fsdp_inspect.server_access import PROXY_HELP, TOKEN_HELP

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8501
_NUM_PORTS_TRIED = 50


def app(  # noqa: PLR0913 - one argument an option
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="A folder of runs, or its URL. Default: the samples, else ./runs.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help=f"Address to listen on. Default: {DEFAULT_HOST}, which accepts connections from "
            "this machine only.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port. Default: the first free one from {DEFAULT_PORT}.",
            parser=whole_number(1, 65535),
            show_default=False,
        ),
    ] = None,
    proxy_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=PROXY_HELP, show_default=False),
    ] = None,
    is_token_wanted: Annotated[
        bool | None, typer.Option("--token/--no-token", help=TOKEN_HELP, show_default=False)
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(
            metavar="URL|COMMAND",
            help=f"Send alerts on runs that are being recorded: {ALERT_HELP}",
            show_default=False,
        ),
    ] = None,
    alert_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help=ALERT_IF_HELP,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve the dashboard until Ctrl-C.

    It listens on 127.0.0.1, so other machines cannot reach it. To use it from another machine,
    forward the port: `ssh -L 8501:127.0.0.1:8501 HOST`. With `--host`, or if this machine has other
    users, the printed URL contains a token, and requests without it are refused. Requests that name
    another host or port are refused too.

    Example: `fsdp-inspect app runs/`
    """
    if alert is not None or alert_if:
        _pass_alerts(directory, alert, alert_if or [])
    serve(directory, host=host, port=port, proxy_name=proxy_name, is_token_wanted=is_token_wanted)


def _pass_alerts(directory: str | None, target: str | None, rules: Sequence[str]) -> None:
    """Check the alerts, and pass them to the server that replaces this process."""
    import os

    from fsdp_inspect.errors import FsdpInspectError
    from fsdp_inspect.store.files import is_url

    if directory is not None and is_url(directory):
        raise FsdpInspectError(
            f"--alert needs a local folder of runs, got {directory!r}. Start the dashboard on the "
            "machine that records."
        )
    try:
        asked = AlertTarget.read(target, rules)
    except ValueError as error:
        raise FsdpInspectError(str(error)) from error
    if asked is not None:
        os.environ[ALERTS_VARIABLE] = asked.encode()


def serve(
    directory: Path | str | None,
    *,
    host: str | None = None,
    port: int | None = None,
    proxy_name: str | None = None,
    is_token_wanted: bool | None = None,
) -> NoReturn:
    """Replace this process by the dashboard server, so that signals reach the server.

    Args:
        directory: A folder of runs, or its URL; None for the samples, or else `./runs`.
        host: Address to listen on; None for this machine only.
        port: None for the first free port.
        proxy_name: Host name of a proxy in front.
        is_token_wanted: Whether requests need a token; None for the default.

    Raises:
        FsdpInspectError: There are no runs, the dashboard is not installed, the port is in use, or
            the proxy's name or the token of the environment is invalid.
    """
    import os
    import sys

    from fsdp_inspect.server_access import choose_token, parse_origin

    _require_dashboard()
    folder = _find_folder(directory)
    chosen = _find_port(host or DEFAULT_HOST, port)
    command = [sys.executable, "-m", "fsdp_inspect_app", str(folder), "--port", str(chosen)]
    command += [] if host is None else ["--host", host]
    if proxy_name is not None:
        parse_origin(proxy_name)
        command += ["--proxy-name", proxy_name]
    # The next process creates the token, because a command line is visible to other users.
    token = choose_token(is_wanted=is_token_wanted, is_host_given=host is not None)
    command += ["--no-token" if token is None else "--token"]
    sys.stdout.flush()
    os.execv(command[0], command)


def _require_dashboard() -> None:
    from importlib.util import find_spec

    from fsdp_inspect.errors import FsdpInspectError

    missing = [name for name in ("fsdp_inspect_app", "streamlit") if find_spec(name) is None]
    if missing:
        raise FsdpInspectError(
            f"The dashboard is not installed: module {missing[0]!r} not found. Expected the "
            "extra [app]. Install it with: pip install 'fsdp-inspect[app]'"
        )


def _find_folder(directory: Path | str | None) -> Path | str:
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.store.files import is_url, open_files

    if directory is not None:
        if is_url(directory):
            open_files(directory).folders("")  # an unreachable URL is reported here
            return directory
        if Path(directory).is_dir():
            return directory
        raise NotARunError(
            f"Folder {str(directory)!r} not found. Expected a folder of runs. Record runs with "
            "`fsdp-inspect demo`, or omit the folder to show the samples."
        )
    samples = Path(__file__).resolve().parents[2] / "samples"
    for candidate in (samples, Path("runs")):
        if candidate.is_dir():
            return candidate
    raise NotARunError(
        "No runs found: there are no samples and no ./runs. Expected a folder of runs. Record runs "
        "with `fsdp-inspect demo`, or give a folder: fsdp-inspect app DIR"
    )


def _find_port(host: str, port: int | None) -> int:
    from fsdp_inspect.errors import FsdpInspectError

    candidates = [port] if port else range(DEFAULT_PORT, DEFAULT_PORT + _NUM_PORTS_TRIED)
    reason = ""
    for candidate in candidates:
        reason = _why_not_listen(host, candidate)
        if not reason:
            return candidate
    tried = f"{candidates[0]}" if port else f"{candidates[0]} to {candidates[-1]}"
    raise FsdpInspectError(
        f"Cannot listen on {host} port {tried}: {reason}. Expected an address of this machine and "
        "a free port. Choose them with --host and --port."
    )


def _why_not_listen(host: str, port: int) -> str:
    """The reason why the system rejects the address; empty if it accepts it."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
