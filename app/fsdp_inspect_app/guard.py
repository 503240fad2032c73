"""Refuse requests before Streamlit sees them: wrong Host, wrong Origin, or no token.

The rules are in `fsdp_inspect.server_access`. A browser opens the URL with the token once. The
answer is a page that sets a cookie and loads the address without the token, so the token is neither
in the address bar nor in links.
"""

from collections.abc import Iterable, Iterator
from html import escape
from urllib.parse import quote, urlencode

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fsdp_inspect.server_access import TOKEN_PARAMETER, ServerAccess, read_bearer

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
