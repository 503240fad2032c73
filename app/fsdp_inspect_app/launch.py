"""How is the dashboard started safely? The command line of its server, built without Streamlit.

Appearance lies in `.streamlit/config.toml` beside the script. What keeps strangers out is passed
as flags, which nothing overrides: neither the environment nor a `config.toml` of the user.
"""

import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8501

_SCRIPT = Path(__file__).with_name("streamlit_app.py")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def server_command(
    runs_folder: Path | None,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    proxy_name: str | None = None,
) -> list[str]:
    """The command that serves the dashboard.

    Args:
        runs_folder: Where the runs lie; None: the samples.
        host: The address to listen on.
        port: The TCP port.
        proxy_name: The host name under which a proxy in front of it is reached.
    """
    return [
        *(sys.executable, "-m", "fsdp_inspect_app.server", "run", str(_SCRIPT)),
        *server_flags(host=host, port=port, proxy_name=proxy_name),
        *(() if runs_folder is None else ("--", str(runs_folder.absolute()))),
    ]


def server_flags(
    *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT, proxy_name: str | None = None
) -> list[str]:
    """Streamlit's flags for serving on that address.

    Requests that name another host are refused (DNS rebinding), and so are pages of other origins.
    """
    is_shared = proxy_name is not None or not is_loopback(host)
    values = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.enableCORS": "true",
        "server.enableXsrfProtection": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.showErrorDetails": "type",
    }
    if is_shared:
        # Named here, it is not asked of a server on the internet.
        reachable = socket.gethostname() if host in ("0.0.0.0", "::") else host
        values["browser.serverAddress"] = proxy_name or reachable
    flags = [f"--{name}={value}" for name, value in values.items()]
    hosts = [*_allowed_hosts(host), *([] if proxy_name is None else [proxy_name])]
    return [*flags, *(f"--server.allowedHosts={name}" for name in hosts)]


def describe_exposure(runs_folder: Path | None, *, host: str, port: int) -> str:
    """What listening on an address that others reach exposes, and what to put in front of it."""
    shown = "the samples" if runs_folder is None else f"{str(runs_folder)!r}"
    return _EXPOSURE.format(host=host, port=port, shown=shown)


_EXPOSURE = """\
Listening on {host}: whoever reaches port {port} of this machine sees every run of {shown}, with
its command lines, settings, environment variables, host names and names of modules. Nobody is
asked who they are, and nothing is encrypted.

Only for yourself: leave --host out, and from your own machine
  ssh -L {port}:127.0.0.1:{port} THIS_MACHINE

A login of its own (OpenID Connect): pip install 'streamlit[auth]', and in ~/.streamlit/secrets.toml
  [auth]
  redirect_uri = "https://NAME/oauth2callback"
  cookie_secret = "LONG RANDOM TEXT"
  client_id = "..."
  client_secret = "..."
  server_metadata_url = "https://PROVIDER/.well-known/openid-configuration"
  [access]                    # leave it out, and every account of the provider gets in
  emails = ["ada@example.org"]
  domains = ["example.org"]

A proxy that asks for a login and speaks TLS, on this machine: leave --host out, and give the name
under which it is reached
  fsdp-inspect app DIR --proxy-name NAME
"""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _allowed_hosts(host: str) -> Sequence[str]:
    """Names under which a browser may ask for the dashboard."""
    if is_loopback(host):
        return _LOCAL_NAMES
    own_names = (host, socket.gethostname(), socket.getfqdn())
    return tuple(dict.fromkeys([*_LOCAL_NAMES, *own_names]))
