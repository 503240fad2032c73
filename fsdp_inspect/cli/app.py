"""`fsdp-inspect app`: serve the dashboard in a browser."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fsdp_inspect.cli.arguments import whole_number

DEFAULT_PORT = 8501
_NUM_PORTS_TRIED = 50


def app(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="A folder of runs. Default: the samples of this checkout, else ./runs.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; the default accepts connections from this machine only."
        ),
    ] = "127.0.0.1",
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
        typer.Option(
            metavar="NAME",
            help="Host name of a reverse proxy; requests with other host names are rejected.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve the dashboard until Ctrl-C.

    It listens on 127.0.0.1, so other machines cannot reach it. To use it from another machine,
    forward the port: `ssh -L 8501:127.0.0.1:8501 HOST`. There is no authentication. With another
    --host, the dashboard warns about this.

    Example: `fsdp-inspect app runs/`
    """
    serve(directory, host=host, port=port, proxy_name=proxy_name)


def serve(
    directory: Path | None, *, host: str, port: int | None, proxy_name: str | None = None
) -> NoReturn:
    """Replace this process by the dashboard server, so that signals reach the server.

    Args:
        directory: A folder of runs; None for the samples, or else `./runs`.
        host: Address to listen on.
        port: None for the first free port.
        proxy_name: Host name of a proxy in front.

    Raises:
        FsdpInspectError: There are no runs, the dashboard is not installed, or the port is in use.
    """
    import os
    import sys

    _require_dashboard()
    folder = _find_folder(directory)
    chosen = _find_port(host, port)
    # A browser cannot open a wildcard address.
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    print(f"Dashboard of {folder}: http://{address}:{chosen} (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "fsdp_inspect_app", str(folder)]
    command += ["--host", host, "--port", str(chosen)]
    command += [] if proxy_name is None else ["--proxy-name", proxy_name]
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


def _find_folder(directory: Path | None) -> Path:
    from fsdp_inspect.errors import NotARunError

    if directory is not None:
        if directory.is_dir():
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
