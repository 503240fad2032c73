"""Decide which requests the dashboard and the metrics server answer: Host, Origin and token.

| check | rule |
|---|---|
| Host | Every request names the server: a name and the port of the server, or of its proxy |
| Origin | If a request has one, it is an origin of the server; a WebSocket must have one |
| token | If the server has a token, every request carries it |

The Host check stops DNS rebinding: a web page whose name an attacker points at this machine. The
Origin check stops pages of other sites and ports. The token stops other users of this machine.
"""

import os
import re
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from fsdp_inspect.errors import FsdpInspectError

TOKEN_VARIABLE = "FSDP_INSPECT_TOKEN"
TOKEN_PARAMETER = "token"
TOKEN_HELP = (
    f"Require a token in the URL, or as `Authorization: Bearer`. {TOKEN_VARIABLE} sets its value. "
    f"By default, a token is required if --host or {TOKEN_VARIABLE} is given, or if the machine "
    "may have other users: another account with a login shell, accounts from a directory service, "
    "or an unreadable user database."
)
PROXY_HELP = (
    "Host name under which a reverse proxy or a tunnel serves this server. NAME means "
    "https://NAME; give another scheme or port as http://NAME:PORT."
)

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_WILDCARDS = ("0.0.0.0", "::", "")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_TOKEN_FORM = re.compile(r"[A-Za-z0-9._~-]{16,}")
_FIRST_HUMAN_UID = 500
"""macOS begins at 500, Linux distributions at 500 or 1000."""
_NOBODY_UIDS = (65534, 2**32 - 2)
_NO_LOGIN = ("nologin", "false", "sync", "shutdown", "halt")
_LOCAL_SERVICES = {"files", "compat", "systemd", "db"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host name and port of a URL."""

    scheme: str
    name: str
    port: int

    def __str__(self) -> str:
        """The origin as a browser writes it, without the default port of the scheme."""
        is_default = self.port == _DEFAULT_PORTS[self.scheme]
        return f"{self.scheme}://{_bracket(self.name)}{'' if is_default else f':{self.port}'}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of a Host header that name this origin."""
        name = _bracket(self.name)
        is_default = self.port == _DEFAULT_PORTS[self.scheme]
        return (f"{name}:{self.port}", name) if is_default else (f"{name}:{self.port}",)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The requests that a server answers."""

    hosts: frozenset[str]
    """Accepted values of the Host header, in lower case."""
    origins: frozenset[str]
    """Accepted values of the Origin header, in lower case."""
    token: str | None
    """None: no token is required."""

    def find_refusal(
        self, hosts: Sequence[str], origins: Sequence[str], *, is_web_socket: bool = False
    ) -> str:
        """The reason to refuse a request, independent of its token; empty if there is none.

        Args:
            hosts: All Host headers of the request.
            origins: All its Origin headers.
            is_web_socket: Whether it opens a WebSocket; browsers always send an Origin with it.
        """
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return (
                "The Host of this request is not a name and port of this server. Open the URL that "
                "the command printed. Give other names or ports with --proxy-name."
            )
        if any(origin.lower() not in self.origins for origin in origins):
            return "The Origin of this request is another site or port."
        if is_web_socket and len(origins) != 1:
            return "A WebSocket to this server requires an Origin."
        return ""

    def accepts_token(self, offered: Iterable[str]) -> bool:
        """Whether one of the values is the token, or no token is required."""
        if self.token is None:
            return True
        expected = self.token.encode()
        matches = [secrets.compare_digest(value.encode(), expected) for value in offered]
        return any(matches)


def make_access(host: str, port: int, proxy: Origin | None, token: str | None) -> ServerAccess:
    """Describe the requests that a server answers.

    Args:
        host: The address that it listens on.
        port: Its port.
        proxy: The origin of a proxy or tunnel in front of it.
        token: The token that requests must carry; None: no token.
    """
    accepted = [Origin("http", name, port) for name in server_names(host)]
    accepted += [] if proxy is None else [proxy]
    hosts = {value.lower() for origin in accepted for value in origin.hosts}
    return ServerAccess(frozenset(hosts), frozenset(str(one).lower() for one in accepted), token)


def server_names(host: str) -> tuple[str, ...]:
    """Names and addresses of a server that listens on `host`."""
    if is_loopback(host):
        return tuple(dict.fromkeys([*_LOOPBACK_NAMES, host]))
    own_name = socket.gethostname()
    names = [*_LOOPBACK_NAMES, own_name, socket.getfqdn()]
    names += _addresses_of(own_name) if host in _WILDCARDS else [host]
    return tuple(dict.fromkeys(name for name in names if name))


def server_url(
    host: str, port: int, path: str, *, proxy: Origin | None = None, token: str | None = None
) -> str:
    """The URL at which a user opens the server.

    It has the address, not `localhost`: another user of this machine may listen on the same port
    of `::1`, which a browser tries first, and would receive the token.
    """
    name = "127.0.0.1" if host in _WILDCARDS else host
    query = "" if token is None else f"?{TOKEN_PARAMETER}={token}"
    return f"{proxy or Origin('http', name, port)}{path}{query}"


def parse_origin(text: str) -> Origin:
    """Parse the origin of a proxy: `NAME`, `NAME:PORT`, `https://NAME` or `http://NAME:PORT`.

    Raises:
        FsdpInspectError: The text does not have one of these forms.
    """
    try:
        url = urlsplit(text if "://" in text else f"https://{text}")
        found = Origin(url.scheme, url.hostname or "", url.port or _DEFAULT_PORTS[url.scheme])
    except (KeyError, ValueError):
        found = None
    if found is None or not found.name or url.path or url.query or url.fragment or url.username:
        raise FsdpInspectError(
            f"Invalid --proxy-name: {text!r}. Expected a host name without a path. Write it as "
            "runs.example.org, or with scheme and port as http://localhost:9000."
        )
    return found


def choose_token(*, is_wanted: bool | None, is_host_given: bool) -> str | None:
    """Choose the token of a new server; None: it requires no token.

    Args:
        is_wanted: The user's choice; None: see `TOKEN_HELP`.
        is_host_given: Whether the user chose the address to listen on.

    Raises:
        FsdpInspectError: The token in the environment is too short or has other characters.
    """
    given = os.environ.get(TOKEN_VARIABLE, "")
    if is_wanted is None:
        is_wanted = is_host_given or bool(given) or may_have_other_users()
    if not is_wanted:
        return None
    if given and not _TOKEN_FORM.fullmatch(given):
        raise FsdpInspectError(
            f"Invalid {TOKEN_VARIABLE}: {len(given)} characters. Expected at least 16 letters, "
            "digits or characters of '._~-'. Create one with: openssl rand -hex 32"
        )
    return given or secrets.token_urlsafe(32)


def may_have_other_users() -> bool:
    """Whether this machine has other users, or may have them.

    Another user is an account with a login shell and the user id of a person. The user database is
    incomplete if it lacks this process's user, or includes a directory service such as LDAP or
    SSSD, which need not list its accounts. Other users are then possible.
    """
    try:
        import pwd

        own_id = os.getuid()
        accounts = pwd.getpwall()
    except (ImportError, AttributeError, OSError):
        return True
    if own_id not in {account.pw_uid for account in accounts} or _has_directory_service():
        return True
    return any(_is_person(account.pw_uid, account.pw_shell, own_id) for account in accounts)


def _is_person(uid: int, shell: str, own_id: int) -> bool:
    is_other = uid >= _FIRST_HUMAN_UID and uid not in (own_id, *_NOBODY_UIDS)
    return is_other and Path(shell).name not in _NO_LOGIN


def _has_directory_service(path: Path = Path("/etc/nsswitch.conf")) -> bool:
    """Whether the name service reads accounts from more than local files."""
    if not path.exists():
        return False
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return True
    entries = [line.partition("#")[0].partition(":") for line in lines]
    services = " ".join(found for name, _, found in entries if name.strip() == "passwd")
    return bool(set(re.sub(r"\[.*?\]", " ", services).split()) - _LOCAL_SERVICES)


def read_bearer(authorization: str) -> str:
    """The token of an `Authorization: Bearer` header; empty for other schemes."""
    scheme, _, value = authorization.partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses_of(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None)
    except OSError:
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def _bracket(name: str) -> str:
    """Write an address as in URLs: an IPv6 address in brackets."""
    return f"[{name}]" if ":" in name else name
