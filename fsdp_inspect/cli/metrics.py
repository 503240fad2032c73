"""`fsdp-inspect store metrics`: serve the numbers of a run to a monitoring system."""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_inspect.cli.arguments import RunArgument, open_stored_argument, whole_number
from fsdp_inspect.cli.export import parse_numbers
from fsdp_inspect.server_access import PROXY_HELP, TOKEN_HELP

if TYPE_CHECKING:
    from email.message import Message

    from fsdp_inspect.analysis.live.monitor import Monitor, MonitoredRun
    from fsdp_inspect.diagnosis.diagnose import Diagnosis
    from fsdp_inspect.server_access import Origin, ServerAccess
    from fsdp_inspect.store.reader import StoredRun

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9464
REQUEST_TIMEOUT_S = 10.0
"""After this time, an incomplete request or an unread answer is cut off."""
_ROOM_S = 1.0
"""The most time that a new connection waits until the oldest one is closed."""
MAX_CONNECTIONS = 16
"""The highest number of concurrent connections, so that threads and files stay bounded. A further
one takes the place of the oldest one that has not sent its request, or else is closed."""
DIAGNOSIS_LIFE_S = 10.0
"""The lifetime of a diagnosis, which reads the black boxes of all ranks (0.3 MB each)."""
_FOLLOW_S = 1.0
"""Time between two looks at a run that is followed."""
_PATH = "/metrics"
_EXPOSURE = (
    "Listening on {host}: everyone who {who} port {port} of this machine can read the names and "
    "times of every unit and the values that the training logged. Nothing is encrypted."
)
_NO_TOKEN = (
    "The metrics require their token: use the URL that the command printed, or send "
    "`Authorization: Bearer TOKEN`.\n"
)


def metrics(  # noqa: PLR0913 - one argument an option
    run: RunArgument,
    port: Annotated[
        int, typer.Option(help="Port; 0 means any free port.", parser=whole_number(0, 65535))
    ] = DEFAULT_PORT,
    host: Annotated[
        str | None,
        typer.Option(
            help=f"Address to listen on. Default: {DEFAULT_HOST}, for this machine only.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="0,1", help="Ranks to serve; default the first 16."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the numbers and exit.")] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            hidden=True,
            help="For trackers: a JSON line for each step of a live run, until it or stdin ends.",
        ),
    ] = False,
    proxy_name: Annotated[
        str | None, typer.Option(metavar="NAME", help=PROXY_HELP, show_default=False)
    ] = None,
    is_token_wanted: Annotated[
        bool | None, typer.Option("--token/--no-token", help=TOKEN_HELP, show_default=False)
    ] = None,
) -> None:
    """Serve the numbers of a run as OpenMetrics, for Prometheus, until Ctrl-C.

    Times are those of the typical step. It is taken from the last 20 steps of a live run, and from
    all timed steps of a finished run. Communication of a live run is that of its last 20 detailed
    steps. Each request reads only the new data of a live run. Step time, data loading and memory
    have the names of torchtitan. The other names begin with fsdp_. docs/gate.md lists them.

    Example: `fsdp-inspect store metrics runs/demo --port 9464`
    """
    from fsdp_inspect.analysis.live.monitor import choose_ranks
    from fsdp_inspect.report.selection import select
    from fsdp_inspect.server_access import choose_token, parse_origin

    if follow:
        _follow(run)
        return
    asked = parse_numbers(ranks, option="--ranks")
    opened = open_stored_argument(run)
    if opened.ranks:
        select(opened, ranks=asked, steps=None)
    source = _Source(run, asked)
    if once:
        print(source.render(), end="")
        return
    left_out = len(opened.ranks) - len(choose_ranks(opened, asked))
    if asked is None and left_out > 0:
        typer.echo(f"Left out {left_out} ranks. Choose others with --ranks.", err=True)
    proxy = None if proxy_name is None else parse_origin(proxy_name)
    token = choose_token(is_wanted=is_token_wanted, is_host_given=host is not None)
    with _listen(host or DEFAULT_HOST, port) as server:
        _serve(server, source.render, host or DEFAULT_HOST, proxy, token, run)


def _follow(argument: str) -> None:
    """Print the numbers of each new step as a JSON line; goodput and alarms every 10 s."""
    from fsdp_inspect.analysis.live.monitor import StepRows
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.trace.run import RunStatus

    is_over = threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(is_over,), daemon=True).start()
    rows: StepRows | None = None
    about: dict[str, float] = {}
    looked_at = -DIAGNOSIS_LIFE_S
    while True:
        is_last = is_over.wait(_FOLLOW_S)
        try:
            run = open_stored_argument(argument)
        except NotARunError:  # the recorder has not written run.json yet
            if is_last:
                raise
            continue
        is_last = is_last or (bool(run.ranks) and run.status is not RunStatus.RUNNING)
        if rows is None and run.ranks:
            rows = StepRows(run)
        new = [] if rows is None else list(rows.read_new(run, is_last=is_last))
        if is_last or time.monotonic() - looked_at > DIAGNOSIS_LIFE_S:
            looked_at, about = time.monotonic(), _judge_run(run)
        for row in new:
            values = {f"fsdp/{name}": value for name, value in {**row.values, **about}.items()}
            print(json.dumps({"step": row.step, "values": values}), flush=True)
        if is_last:
            return


def _judge_run(run: "StoredRun") -> dict[str, float]:
    """The goodput, and 1 for each problem that the diagnosis finds."""
    from fsdp_inspect.analysis.lifetime import measure_lifetime
    from fsdp_inspect.diagnosis.diagnose import diagnose
    from fsdp_inspect.errors import FsdpInspectError

    about: dict[str, float] = {}
    with contextlib.suppress(FsdpInspectError):
        about["goodput_ratio"] = measure_lifetime(run).goodput_ratio
    with contextlib.suppress(FsdpInspectError):
        found = diagnose(run)
        about["alarm"] = float(found.problem is not None)
        if found.problem is not None:
            about[f"alarm/{found.problem.value.replace(' ', '_')}"] = 1.0
    return about


def _wait_for_end_of_input(is_over: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.readline():
            pass
    is_over.set()


class _Source:
    """The metrics of a run at the time of each request."""

    def __init__(self, argument: str, asked: list[int] | None) -> None:
        self._argument = argument
        self._asked = asked
        self._lock = threading.Lock()
        self._followed: tuple[tuple[int, ...], Monitor] | None = None
        self._over: str | None = None
        self._diagnosed: tuple[float, Diagnosis] | None = None

    def render(self) -> str:
        """Render the current numbers. For a run that is over, they are computed once."""
        from fsdp_inspect.report.openmetrics import find_families, render_openmetrics
        from fsdp_inspect.trace.run import RunStatus

        with self._lock:
            if self._over is not None:
                return self._over
            run = open_stored_argument(self._argument)
            text = render_openmetrics(find_families(self._look(run), self._diagnose(run)))
            if run.status is not RunStatus.RUNNING:
                self._over = text
            return text

    def _diagnose(self, run: "StoredRun") -> "Diagnosis":
        """The diagnosis of the run. For a live run, it is at most `DIAGNOSIS_LIFE_S` old."""
        from fsdp_inspect.diagnosis.diagnose import diagnose
        from fsdp_inspect.trace.run import RunStatus

        now = time.monotonic()
        is_live = run.status is RunStatus.RUNNING
        if self._diagnosed is None or not is_live or now - self._diagnosed[0] > DIAGNOSIS_LIFE_S:
            self._diagnosed = now, diagnose(run)
        return self._diagnosed[1]

    def _look(self, run: "StoredRun") -> "MonitoredRun":

        from fsdp_inspect.analysis.live.monitor import Monitor, choose_ranks, monitor_run
        from fsdp_inspect.trace.run import RunStatus

        ranks = choose_ranks(run, self._asked)
        if run.status is not RunStatus.RUNNING:
            return monitor_run(run, ranks)
        if self._followed is None or self._followed[0] != ranks:
            self._followed = ranks, Monitor(ranks)
        return self._followed[1].look(run)


def _listen(host: str, port: int) -> "_BoundedServer":
    from fsdp_inspect.errors import FsdpInspectError

    try:
        return _BoundedServer((host, port), BaseHTTPRequestHandler)
    except OSError as error:
        raise FsdpInspectError(
            f"Cannot listen on {host}, port {port}: {error.strerror or error}. Expected a free "
            "port of this machine. Choose another one with --port; 0 takes any."
        ) from error


class _BoundedServer(ThreadingHTTPServer):
    """A server with a limit on concurrent connections."""

    request_queue_size = 128
    """The highest number of connections that wait to be accepted. With Python's default of 5, the
    clients of a burst retry after 1, 3 and 7 s."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._incomplete: dict[socket.socket, None] = {}
        """Connections whose request is not complete, the oldest first."""
        self._lock = threading.Lock()

    def note_complete(self, request: socket.socket) -> None:
        """Keep a connection from now on, because its request is complete."""
        with self._lock:
            self._incomplete.pop(request, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread.

        If there are too many connections, the oldest one whose request is not complete makes room.
        Without one, the new connection is closed.
        """
        if not self._free.acquire(blocking=False) and not self._make_room():
            self.shutdown_request(request)
            return
        with self._lock:
            self._incomplete[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then allow another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.note_complete(request)
            self._free.release()

    def _make_room(self) -> bool:
        """Close the oldest connection whose request is not complete, and take its place."""
        with self._lock:
            oldest = next(iter(self._incomplete), None)
            if oldest is not None:
                del self._incomplete[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return oldest is not None and self._free.acquire(timeout=_ROOM_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an error of the connection, so that the server prints no traceback."""


def _serve(
    server: ThreadingHTTPServer,
    render: Callable[[], str],
    host: str,
    proxy: "Origin | None",
    token: str | None,
    run: str,
) -> None:
    """Serve until interrupted. The port is bound before, because accepted requests name it."""
    from fsdp_inspect.server_access import is_loopback, make_access, server_url

    port = int(server.server_address[1])
    server.RequestHandlerClass = _handler(render, make_access(host, port, proxy, token))
    if not is_loopback(host):
        who = "reaches" if token is None else "has the token and reaches"
        typer.echo(_EXPOSURE.format(host=host, port=port, who=who), err=True)
    url = server_url(host, port, _PATH, proxy=proxy, token=token)
    print(f"Metrics of {run}: {url} (Ctrl-C ends it)", flush=True)
    server.serve_forever()


class _TimedHandler(BaseHTTPRequestHandler):
    """Cuts off a request that is not complete after `REQUEST_TIMEOUT_S`."""

    timeout = REQUEST_TIMEOUT_S

    def setup(self) -> None:
        """Start the deadline."""
        super().setup()
        # The socket's timeout restarts with each byte. This timer covers the whole request.
        self._deadline = threading.Timer(REQUEST_TIMEOUT_S, self._cut_off)
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        """Stop the deadline."""
        self._deadline.cancel()
        super().finish()

    def parse_request(self) -> bool:
        """Stop the deadline when the request is complete."""
        is_complete = super().parse_request()
        self._deadline.cancel()
        if isinstance(self.server, _BoundedServer):
            self.server.note_complete(self.request)
        return is_complete

    def _cut_off(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _handler(render: Callable[[], str], access: "ServerAccess") -> type[BaseHTTPRequestHandler]:
    """A handler that answers accepted requests with the text of `render`."""
    from fsdp_inspect.errors import FsdpInspectError
    from fsdp_inspect.report.openmetrics import CONTENT_TYPE

    class Handler(_TimedHandler):
        server_version = "fsdp-inspect"
        sys_version = ""

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            refusal = _find_refusal(access, self.headers, query)
            if refusal:
                self._answer(403, "text/plain; charset=utf-8", refusal)
            elif path != _PATH:
                self._answer(404, "text/plain; charset=utf-8", f"The metrics are at {_PATH}.\n")
            else:
                self._answer_metrics()

        def _answer_metrics(self) -> None:
            try:
                self._answer(200, CONTENT_TYPE, render())
            except (FsdpInspectError, OSError) as error:
                self._answer(503, "text/plain; charset=utf-8", f"{error}\n")
            except Exception as error:
                self._answer(500, "text/plain; charset=utf-8", f"{type(error).__name__}\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing for each request."""

    return Handler


def _find_refusal(access: "ServerAccess", headers: "Message", query: str) -> str:
    """The reason to refuse a request; empty if it is accepted."""
    from urllib.parse import parse_qs

    from fsdp_inspect.server_access import TOKEN_PARAMETER, read_bearer

    refusal = access.find_refusal(headers.get_all("Host", []), headers.get_all("Origin", []))
    if refusal:
        return f"{refusal}\n"
    in_query = parse_qs(query).get(TOKEN_PARAMETER, [])
    bearer = read_bearer(headers.get("Authorization", ""))
    return "" if access.accepts_token([*in_query, bearer]) else _NO_TOKEN
