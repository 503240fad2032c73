"""Serve the dashboard, limit unfinished requests, and load the modules of pages ahead.

`python -m fsdp_inspect_app.server run SCRIPT ...` is like `streamlit run SCRIPT ...`. Streamlit
loads the libraries when the first page opens. This server loads them while the browser starts,
which saves two seconds.
"""

import asyncio
import contextlib
import gc
import importlib
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

MOST_UNFINISHED = 64
"""Connections whose request is not complete. Above it, the oldest one is closed."""
HEADERS_S = 10.0
"""The most time for the first line and the headers of a request."""
BODY_PAUSE_S = 60.0
"""The longest pause in the body of a request, such as an upload."""
_PROTOCOLS = (
    ("uvicorn.protocols.http.h11_impl", "H11Protocol"),
    ("uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol"),
)
_ALLOCATIONS_PER_COLLECTION = 50_000
_NEEDED = (
    "pandas",
    "fsdp_inspect.analysis.summary",
    "fsdp_inspect_app.loading",
    "fsdp_inspect_app.app_pages.timeline.frames",
    "fsdp_inspect_app.catalog_reading",
    "fsdp_inspect.report.figures",
    "fsdp_inspect.analysis.rank_waits",
    "fsdp_inspect.advice.run_advice",
    "fsdp_inspect.report.html",
)
"""The modules to load, the most important first. Other modules of pages load quickly."""


def main() -> None:
    """Serve until interrupted.

    Python's own garbage collections are rarer than by default, because they took 10% of the time in
    which a run of 4,096 ranks opens. Streamlit collects garbage after every run of the script.
    """
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)
    limit_unfinished_requests()
    from streamlit.web import cli  # the server starts before the modules of pages load

    folder = sys.argv[sys.argv.index("--") + 1] if "--" in sys.argv else None
    threading.Thread(target=load_ahead, args=(folder,), name="load-ahead", daemon=True).start()
    cli.main(prog_name="streamlit")


def limit_unfinished_requests() -> None:
    """Close connections that send a request too slowly or are too many: uvicorn has no limit."""
    for module, name in _PROTOCOLS:
        with contextlib.suppress(ImportError, AttributeError):  # httptools is optional
            _limit(getattr(importlib.import_module(module), name), _Unfinished())


class _Unfinished:
    """The connections whose request is not complete, the oldest first."""

    def __init__(self) -> None:
        self._deadlines: OrderedDict[Any, asyncio.TimerHandle] = OrderedDict()

    def note(self, protocol: Any) -> None:
        """Start, restart or end the deadline of a connection after it sent something."""
        is_body = protocol.cycle is not None and not protocol.cycle.response_complete
        is_complete = is_body and not protocol.cycle.more_body
        if is_complete or protocol.transport.get_protocol() is not protocol:  # a WebSocket
            self.forget(protocol)
        elif is_body:
            self.forget(protocol)
            self._add(protocol, BODY_PAUSE_S)
        elif protocol not in self._deadlines:
            self._add(protocol, HEADERS_S)

    def forget(self, protocol: Any) -> None:
        """End the deadline of a connection."""
        deadline = self._deadlines.pop(protocol, None)
        if deadline is not None:
            deadline.cancel()

    def _add(self, protocol: Any, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines[protocol] = loop.call_later(timeout_s, self._close, protocol)
        if len(self._deadlines) > MOST_UNFINISHED:
            self._close(next(iter(self._deadlines)))

    def _close(self, protocol: Any) -> None:
        self.forget(protocol)
        protocol.transport.abort()


def _limit(protocol: type[Any], unfinished: _Unfinished) -> None:
    """Let a protocol of uvicorn report each connection, its data and its end."""
    made, received, lost = (
        protocol.connection_made,
        protocol.data_received,
        protocol.connection_lost,
    )

    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        unfinished.note(self)

    def data_received(self: Any, data: bytes) -> None:
        received(self, data)
        unfinished.note(self)

    def connection_lost(self: Any, error: Exception | None) -> None:
        unfinished.forget(self)
        lost(self, error)

    protocol.connection_made = connection_made
    protocol.data_received = data_received
    protocol.connection_lost = connection_lost


def load_ahead(folder: str | None = None) -> None:
    """Load the modules of pages, and start the alerts.

    A module that fails is reported by the page that needs it.

    Streamlit collects garbage after every run of the script, with the interpreter's lock held. The
    modules are never garbage, but scanning them took 150 ms, and a click runs two scripts. They are
    therefore excluded from the collection.
    """
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            return
    gc.freeze()
    alert_watch = importlib.import_module("fsdp_inspect.alert_watch")
    alert_watch.start_from_environment(None if folder is None else Path(folder))


if __name__ == "__main__":
    main()
