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
    runs_folder: Path | None, *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT
) -> list[str]:
    """The command that serves the dashboard.

    Args:
        runs_folder: Where the runs lie; None: the samples.
        host: The address to listen on.
        port: The TCP port.
    """
    return [
        *(sys.executable, "-m", "streamlit", "run", str(_SCRIPT)),
        *server_flags(host=host, port=port),
        *(() if runs_folder is None else ("--", str(runs_folder.absolute()))),
    ]


def server_flags(*, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> list[str]:
    """Streamlit's flags for serving on that address.

    Requests that name another host are refused (DNS rebinding), and so are pages of other origins.
    """
    values = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.enableCORS": "true",
        "server.enableXsrfProtection": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.showErrorDetails": "full" if is_loopback(host) else "type",
    }
    flags = [f"--{name}={value}" for name, value in values.items()]
    return [*flags, *(f"--server.allowedHosts={name}" for name in _allowed_hosts(host))]


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
