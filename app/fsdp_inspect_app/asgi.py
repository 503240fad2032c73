"""The dashboard as an ASGI application: Streamlit's own application, behind the guard.

`streamlit run asgi.py` finds `app`. `launch` starts it and passes the accepted requests.
"""

from pathlib import Path

import streamlit as st
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsdp_inspect_app.guard import Guard
from fsdp_inspect_app.launch import receive_access

# --- Add the dashboard's title, its script for the history and its policy to Streamlit's HTML page.
#
# The Content-Security-Policy lets a browser load nothing from other servers. Text of a run that is
# shown as markup by mistake can then neither load an image nor send data.


_TITLE = (b"<title>Streamlit</title>", b"<title>FSDP Inspect</title>")
_HEAD = b"<head>"
_SERVER = b'window.__streamlit = { BACKEND_BASE_URL: new URL(".", location.href).href };\n'
"""Without it, Streamlit first looks for its server below the address of the page: a 404 a page."""
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",  # Streamlit and its components
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
    )
)


class Shell:
    """ASGI middleware that changes the HTML page which loads Streamlit, and nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        script = Path(__file__).with_name("history.js").read_bytes()
        self._head = b"".join((_HEAD, b"<script>\n", _SERVER, script, b"</script>"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and change the answer if it is an HTML page."""
        if scope["type"] != "http" or "text/html" not in Headers(scope=scope).get("accept", ""):
            await self._app(scope, receive, send)
            return
        plain = dict(scope)
        plain["headers"] = [
            (name, value) for name, value in scope["headers"] if name != b"accept-encoding"
        ]
        await self._app(plain, receive, _Page(send, self._head).send)


class _Page:
    """One answer, which is held back until its body is complete if it is HTML."""

    def __init__(self, send: Send, head: bytes) -> None:
        self._send = send
        self._head = head
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """Send a part of the answer, or keep it."""
        if message["type"] == "http.response.start" and _is_html(message):
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_page(self._start)
        else:
            await self._send(message)

    async def _send_page(self, start: Message) -> None:
        body = self._body.replace(*_TITLE, 1).replace(_HEAD, self._head, 1)
        headers = MutableHeaders(raw=list(start["headers"]))
        if "content-length" in headers and self._body:
            headers["content-length"] = str(len(body))
        headers["content-security-policy"] = _POLICY
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})


def _is_html(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return headers.get("content-type", "").startswith("text/html")


# Browsers send a cookie to every port of a host, so each dashboard has a separate cookie.
_COOKIE = f"fsdp-inspect-token-{st.get_option('server.port')}"

app = st.App(
    Path(__file__).with_name("streamlit_app.py"),
    middleware=[Middleware(Guard, access=receive_access(), cookie=_COOKIE), Middleware(Shell)],
)
