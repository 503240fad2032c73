"""Refuse requests before Streamlit sees them: wrong Host, wrong Origin, or no token.

The rules are in `fsdp_inspect.server_access`. A browser opens the URL with the token once. The
answer is a page that sets a cookie and loads the address without the token, so the token is neither
in the address bar nor in links.
"""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

import streamlit as st
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fsdp_inspect.server_access import TOKEN_PARAMETER, ServerAccess, read_bearer
from fsdp_inspect_app.cards import show_headline
from fsdp_inspect_app.wording import plain

_NO_TOKEN = (
    "The dashboard requires its token: open the URL that `fsdp-inspect app` printed when it "
    "started.\n"
)
_RELOAD = """\
<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="refresh" content="0;url={address}"><title>FSDP Inspect</title></head>
<body><a href="{address}">Open the dashboard</a></body></html>
"""
_PRIVATE = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class Guard:
    """ASGI middleware that answers only requests that `access` accepts."""

    def __init__(self, app: ASGIApp, access: ServerAccess, *, cookie: str) -> None:
        self._app = app
        self._access = access
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an accepted request on, or answer a refused one."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = self._answer(HTTPConnection(scope), is_web_socket=scope["type"] == "websocket")
        await (answer or self._app)(scope, receive, send)

    def _answer(self, request: HTTPConnection, *, is_web_socket: bool) -> Response | None:
        """The answer to a refused request; None: it is accepted."""
        headers = request.headers
        refusal = self._access.find_refusal(
            headers.getlist("host"), headers.getlist("origin"), is_web_socket=is_web_socket
        )
        if refusal:
            return PlainTextResponse(f"{refusal}\n", 403, _PRIVATE)
        if _is_page(request) and self._has_token(_in_query(request)):
            return self._set_cookie(request)
        if self._has_token(self._all_tokens(request)):
            return None
        if _is_link_of_another_site(request):
            return _reload(request)
        return PlainTextResponse(_NO_TOKEN, 403, _PRIVATE)

    def _has_token(self, offered: Iterable[str]) -> bool:
        return self._access.accepts_token(offered)

    def _all_tokens(self, request: HTTPConnection) -> Iterator[str]:
        yield request.cookies.get(self._cookie, "")
        yield read_bearer(request.headers.get("authorization", ""))
        yield from _in_query(request)

    def _set_cookie(self, request: HTTPConnection) -> Response | None:
        if self._access.token is None:
            return None
        response = _reload(request)
        response.set_cookie(
            self._cookie,
            self._access.token,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response


def _in_query(request: HTTPConnection) -> list[str]:
    return request.query_params.getlist(TOKEN_PARAMETER)


def _is_page(request: HTTPConnection) -> bool:
    """Whether a browser loads a page, not a file of a page."""
    is_get = request.scope.get("method") == "GET"
    return is_get and "text/html" in request.headers.get("accept", "")


def _is_link_of_another_site(request: HTTPConnection) -> bool:
    """Whether a browser followed a link or redirect of another site.

    The browser omits a strict cookie from such a request, for example after the login at an OpenID
    provider. If a page of this server loads the same address, the browser sends the cookie.
    """
    headers = request.headers
    is_window = headers.get("sec-fetch-dest") == "document"
    return _is_page(request) and is_window and headers.get("sec-fetch-site") == "cross-site"


def _reload(request: HTTPConnection) -> Response:
    """A page that loads the same address, without the token."""
    last = request.url.path.rpartition("/")[2]
    pairs = [pair for pair in request.query_params.multi_items() if pair[0] != TOKEN_PARAMETER]
    query = f"?{urlencode(pairs)}" if pairs else ""
    # Relative, so that no path can lead to another site.
    address = escape(f"./{quote(last, safe='')}{query}")
    return HTMLResponse(_RELOAD.format(address=address), headers=_PRIVATE)


# --- Check access to the runs: for everyone who reaches the server, or only for logged-in users.
#
# The login is Streamlit's own (OpenID Connect), configured in `secrets.toml`:
#
# [auth]
# redirect_uri = "https://runs.example.org/oauth2callback"
# cookie_secret = "..."
# client_id = "..."
# client_secret = "..."
# server_metadata_url = "https://accounts.example.org/.well-known/openid-configuration"
#
# [access]
# emails = ["ada@example.org"]
# domains = ["example.org"]
#
# With `[auth]`, nothing is shown before a login. Without `[access]`, every account of the provider
# may see the runs. With it, only the named addresses may, if the provider has verified them.

_AUTH, _ACCESS = "auth", "access"


def has_access() -> bool:
    """Whether the user may see the runs. Nothing of a run may be read before."""
    secrets = _read_secrets()
    if _AUTH not in secrets:
        return True
    user = st.user.to_dict()
    return bool(user.get("is_logged_in", False)) and may_enter(user, secrets.get(_ACCESS, {}))


def require_login() -> None:
    """Continue for users with access; all other users are asked to log in."""
    if has_access():
        return
    user = st.user.to_dict()
    if not user.get("is_logged_in", False):
        show_headline("These runs are shown after a login\\.")
        st.button("Log in", on_click=st.login, type="primary", key="log-in")
    else:
        show_headline("This account may not see these runs\\.")
        st.markdown(plain(f"You are logged in as {user.get('email', 'an account without email')}."))
        st.button("Log out", on_click=st.logout, key="log-out")
    st.stop()


def may_enter(user: Mapping[str, Any], access: Mapping[str, Any]) -> bool:
    """Whether a logged-in user has access to the runs.

    Args:
        user: The provider's data about the user: `email`, and `email_verified` if present.
        access: The section `access`; an empty one allows every user.
    """
    if not access:
        return True
    email = str(user.get("email") or "").casefold()
    if not email or user.get("email_verified") is False:
        return False
    emails = {str(one).casefold() for one in access.get("emails", ())}
    domains = {str(one).casefold() for one in access.get("domains", ())}
    return email in emails or email.rpartition("@")[2] in domains


def _read_secrets() -> Mapping[str, Any]:
    """The secrets of the server; empty without a file of secrets."""
    return st.secrets if st.secrets.load_if_toml_exists() else {}
