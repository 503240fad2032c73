"""Build the command line that serves the dashboard, without importing Streamlit.

The appearance is in `.streamlit/config.toml` next to the script. Settings that protect the server
are flags, so neither the environment nor the user's `config.toml` overrides them. The accepted
requests and the token are passed in the environment, because other users can read a command line.
"""

import os
import socket
import sys
from pathlib import Path

import msgspec

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.server_access import Origin, ServerAccess, is_loopback, server_names

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8501
MAX_UPLOAD_MIB = 1024
"""The largest uploaded file. Streamlit holds an upload in memory."""

_SCRIPT = Path(__file__).with_name("asgi.py")
_ACCESS_VARIABLE = "FSDP_INSPECT_SERVER_ACCESS"


def server_command(
    runs_folder: Path | str | None,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    proxy: Origin | None = None,
) -> list[str]:
    """The command that serves the dashboard.

    Args:
        runs_folder: The folder of runs, or its URL; None: the samples.
        host: The address to listen on.
        port: The TCP port.
        proxy: The origin of a proxy or tunnel in front of it.
    """
    return [
        *(sys.executable, "-m", "fsdp_inspect_app.server", "run", str(_SCRIPT)),
        *server_flags(host=host, port=port, proxy=proxy),
        *(() if runs_folder is None else ("--", _absolute(runs_folder))),
    ]


def _absolute(folder: Path | str) -> str:
    return folder if isinstance(folder, str) else str(folder.absolute())


def server_flags(
    *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT, proxy: Origin | None = None
) -> list[str]:
    """Streamlit's flags for serving on that address.

    Streamlit checks Host and Origin of the WebSocket only, so `guard` checks all requests first.
    """
    is_shared = proxy is not None or not is_loopback(host)
    values = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.enableCORS": "true",
        "server.enableXsrfProtection": "true",
        "server.fileWatcherType": "none",
        "server.maxUploadSize": str(MAX_UPLOAD_MIB),
        "browser.gatherUsageStats": "false",
        "client.showErrorDetails": "type",
        "logger.hideWelcomeMessage": "true",  # it shows a URL without the token
    }
    if is_shared:
        # Without a name, Streamlit requests the address from a server on the internet.
        reachable = socket.gethostname() if host in ("0.0.0.0", "::") else host
        values["browser.serverAddress"] = reachable if proxy is None else proxy.name
    flags = [f"--{name}={value}" for name, value in values.items()]
    hosts = [*server_names(host), *([] if proxy is None else [proxy.name])]
    return [*flags, *(f"--server.allowedHosts={name}" for name in hosts)]


def pass_access(access: ServerAccess) -> None:
    """Pass the accepted requests to the server that replaces this process."""
    os.environ[_ACCESS_VARIABLE] = msgspec.json.encode(access).decode()


def receive_access() -> ServerAccess:
    """Read the accepted requests; processes that the server starts do not inherit them.

    Raises:
        FsdpInspectError: Another command started the server.
    """
    text = os.environ.pop(_ACCESS_VARIABLE, None)
    if text is None:
        raise FsdpInspectError(
            f"The variable {_ACCESS_VARIABLE} is missing, so the dashboard does not know which "
            "requests it may answer. Start it with: fsdp-inspect app DIR"
        )
    return msgspec.json.decode(text, type=ServerAccess)


def describe_exposure(
    runs_folder: Path | str | None, *, host: str, port: int, has_token: bool
) -> str:
    """Describe the exposure of a server on a reachable address, and how to protect it."""
    shown = "the samples" if runs_folder is None else f"{str(runs_folder)!r}"
    who = "everyone who has the token and" if has_token else "everyone who"
    return _EXPOSURE.format(host=host, port=port, shown=shown, who=who)


_EXPOSURE = """\
Listening on {host}: {who} reaches port {port} of this machine sees every run of {shown}, with
its command lines, settings, environment variables, host names and names of modules. Nothing is
encrypted, neither the runs nor the token: use this only in a network that you trust.

To see the runs only yourself: leave --host out, and run on your own machine
  ssh -L {port}:127.0.0.1:{port} THIS_MACHINE

To add a login (OpenID Connect): pip install 'streamlit[auth]', and in ~/.streamlit/secrets.toml
  [auth]
  redirect_uri = "https://NAME/oauth2callback"
  cookie_secret = "LONG RANDOM TEXT"
  client_id = "..."
  client_secret = "..."
  server_metadata_url = "https://PROVIDER/.well-known/openid-configuration"
  [access]                    # without it, every account of the provider is accepted
  emails = ["ada@example.org"]
  domains = ["example.org"]

To use a proxy with a login and TLS on this machine: leave --host out, and give the name of the
proxy
  fsdp-inspect app DIR --proxy-name NAME
"""
