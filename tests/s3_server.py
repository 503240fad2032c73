"""A real S3 server on loopback (moto), and a proxy in front that is slow or fails."""

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def serve_s3() -> Iterator[str]:
    """Start the server; the value is its endpoint."""
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "-p", str(port)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on, after a delay, or answers with an error of S3."""

    daemon_threads = True
    latency_s = 0.0
    failure_ratio = 0.0
    """The fraction of the requests that fail with 503."""
    error: tuple[int, str] | None = None
    """Status and code of the answer to each request; None: pass requests on."""
    write_error: tuple[int, str] | None = None
    """The same for requests that write."""
    has_conditions = True
    """False: writes with a condition fail, as in stores without conditional writes."""
    hold_after: tuple[str, str] | None = None
    """The method of a request and the end of its path: its answer waits for `release`."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = endpoint.removeprefix("http://")
        self.chance = random.Random(0)
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.num_failed = 0
        self.is_holding = threading.Event()
        self._may_answer = threading.Event()

    def release(self) -> None:
        """Answer the held request, and hold no further one."""
        self.hold_after = None
        self._may_answer.set()
        self._may_answer = threading.Event()
        self.is_holding.clear()

    def hold(self, method: str, path: str) -> None:
        """Wait if this request is to be held."""
        chosen, may_answer = self.hold_after, self._may_answer
        if chosen is not None and method == chosen[0] and path.endswith(chosen[1]):
            self.is_holding.set()
            may_answer.wait()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients are killed while they wait for an answer."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve_proxy(endpoint: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(endpoint) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _pass_on(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy.requests.append((self.command, self.path))
        time.sleep(proxy.latency_s)
        is_conditional = "If-Match" in self.headers or "If-None-Match" in self.headers
        if proxy.error is not None:
            self._answer_error(*proxy.error)
        elif proxy.write_error is not None and self.command != "GET":
            self._answer_error(*proxy.write_error)
        elif is_conditional and not proxy.has_conditions:
            self._answer_error(501, "NotImplemented")
        elif proxy.chance.random() < proxy.failure_ratio:
            proxy.num_failed += 1
            self._answer_error(503, "ServiceUnavailable")
        else:
            self._forward(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _forward(self, body: bytes) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream)
        headers = {name: value for name, value in self.headers.items() if name != "Expect"}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        content = answer.read()
        self.server.hold(self.command, self.path.partition("?")[0])
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
        self._finish(str(length or 0), content)
        upstream.close()

    def _answer_error(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self._finish(str(len(text)), text.encode())

    def _finish(self, length: str, content: bytes) -> None:
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the S3 server did not start (exit code {process.poll()})")
