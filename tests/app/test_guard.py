"""The server answers only requests with its own Host and Origin, and with the token."""

import http.client
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from typing import NamedTuple

import pytest
from fsdp_inspect_app.server import MOST_UNFINISHED
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

TOKEN = "a-token-for-these-tests"
PATHS = [
    "/",
    "/overview",
    "/_stcore/health",
    "/_stcore/host-config",
    "/_stcore/metrics",
    "/media/0123.png",
    "/component/x/y.js",
    "/static/index.js",
    "/_stcore/upload_file/a/b",
    "/oauth2callback",
    "/favicon.png",
    "/not/there",
]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


class Server:
    """A dashboard on a free port."""

    def __init__(self, port):
        self.port = port
        self.cookie = {"Cookie": f"fsdp-inspect-token-{port}={TOKEN}"}
        self.origin = f"http://127.0.0.1:{port}"

    def ask(self, path, *, method="GET", **headers):
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, text)

    def open_socket(self, *, origin, query="", **headers):
        """The status of the answer to a WebSocket."""
        uri = f"ws://127.0.0.1:{self.port}/_stcore/stream{query}"
        try:
            with connect(uri, origin=origin, additional_headers=headers, proxy=None):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code


def start(folder, port, *options, **environment):
    command = [sys.executable, "-m", "fsdp_inspect_app", str(folder), "--port", str(port)]
    return subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def wait_for(server, process):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return server.ask("/_stcore/health")
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the dashboard did not start")


@pytest.fixture(scope="module")
def server(tmp_path_factory, free_port):
    found = Server(free_port())
    options = ("--token", "--proxy-name", "runs.example.org")
    environment = {**os.environ, "FSDP_INSPECT_TOKEN": TOKEN}
    process = start(tmp_path_factory.mktemp("runs"), found.port, *options, **environment)
    try:
        wait_for(found, process)
        yield found
    finally:
        process.terminate()
        process.wait(300)
        process.stdout.close()


@pytest.mark.parametrize("path", PATHS)
def test_every_path_refuses_wrong_hosts_wrong_origins_and_a_missing_token(server, path):
    assert server.ask(path, Host="evil.example", **server.cookie).status == 403
    assert server.ask(path, Host=f"evil.example:{server.port}", **server.cookie).status == 403
    assert server.ask(path, Host="127.0.0.1:1", **server.cookie).status == 403
    assert server.ask(path, Origin="http://evil.example", **server.cookie).status == 403
    refused = server.ask(path)
    assert refused.status == 403
    assert refused.text == (
        "The dashboard requires its token: open the URL that `fsdp-inspect app` printed when it "
        "started.\n"
    )
    assert server.ask(path, **server.cookie).status != 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_every_method_is_checked(server, method):
    path = "/_stcore/upload_file/a/b"
    assert server.ask(path, method=method).status == 403
    evil = {"Origin": "http://evil.example", **server.cookie}
    assert server.ask(path, method=method, **evil).status == 403


def test_the_token_is_accepted_as_cookie_bearer_and_parameter(server):
    assert server.ask("/_stcore/health", **server.cookie).text == "ok"
    assert server.ask("/_stcore/health", Authorization=f"Bearer {TOKEN}").text == "ok"
    assert server.ask(f"/_stcore/health?token={TOKEN}").text == "ok"
    assert server.ask(f"/_stcore/health?token={TOKEN}x").status == 403
    assert server.ask("/_stcore/health", Authorization="Bearer é").status == 403
    assert server.ask("/_stcore/health", Cookie=f"fsdp-inspect-token-1={TOKEN}").status == 403


def test_a_page_with_the_token_sets_the_cookie_and_loads_the_address_without_it(server):
    opened = server.ask(f"/overview?run=a%22%3E&token={TOKEN}", Accept="text/html")
    assert opened.status == 200
    cookie = opened.headers["set-cookie"]
    assert cookie.startswith(server.cookie["Cookie"])
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie
    assert re.findall('url=([^"]*)"', opened.text) == ["./overview?run=a%22%3E"]
    assert opened.headers["referrer-policy"] == "no-referrer"
    assert opened.headers["cache-control"] == "no-store"
    assert TOKEN not in opened.text


@pytest.mark.parametrize("path", ["//evil.example", "/%5Cevil.example/", "/javascript:alert(1)"])
def test_the_page_that_drops_the_token_leads_nowhere_else(server, path):
    opened = server.ask(f"{path}?token={TOKEN}", Accept="text/html")
    assert all(url.startswith("./") for url in re.findall('url=([^"]*)"', opened.text))


def test_behind_tls_the_cookie_is_for_tls_only(server):
    names = {"Host": "runs.example.org", "X-Forwarded-Proto": "https", "Accept": "text/html"}
    opened = server.ask(f"/?token={TOKEN}", **names)
    assert "Secure" in opened.headers["set-cookie"]


def test_a_link_of_another_site_loads_the_page_again_so_that_the_browser_sends_the_cookie(server):
    link = {"Accept": "text/html", "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "document"}
    opened = server.ask("/overview?run=a", **link)
    assert opened.status == 200
    assert 'url=./overview?run=a"' in opened.text
    assert "set-cookie" not in opened.headers
    assert server.ask("/overview", **{**link, "Sec_Fetch_Site": "same-origin"}).status == 403
    assert server.ask("/overview", **{**link, "Sec_Fetch_Dest": "iframe"}).status == 403


def test_a_web_socket_needs_the_token_its_own_origin_and_its_own_host(server):
    cookie, own = server.cookie, server.origin
    assert server.open_socket(origin=own, **cookie) == 101
    assert server.open_socket(origin=own) == 403
    assert server.open_socket(origin=own, query=f"?token={TOKEN}") == 101
    assert server.open_socket(origin=None, **cookie) == 403
    for origin in ("null", "http://evil.example", "http://127.0.0.1:1", f"https{own[4:]}"):
        assert server.open_socket(origin=origin, **cookie) == 403


def test_a_proxy_may_pass_on_its_own_host_or_the_servers(server):
    proxy = "https://runs.example.org"
    assert server.open_socket(origin=proxy, **server.cookie) == 101
    assert server.ask("/", Host="runs.example.org", **server.cookie).status == 200
    assert server.ask("/", Host="runs.example.org", Origin=proxy, **server.cookie).status == 200
    plain = {"Host": "runs.example.org", "Origin": "http://runs.example.org"}
    assert server.ask("/", **plain, **server.cookie).status == 403


def test_two_hosts_are_refused(server):
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.putrequest("GET", "/", skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{server.port}")
        connection.putheader("Host", "evil.example")
        connection.putheader("Cookie", server.cookie["Cookie"])
        connection.endheaders()
        assert connection.getresponse().status in (400, 403)


@pytest.mark.slow
def test_half_sent_requests_are_closed_by_number_and_the_page_is_answered(server):
    with ExitStack() as opened:
        halves = []
        for _ in range(MOST_UNFINISHED + 40):
            half = opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            half.sendall(b"GET / HTTP/1.1\r\nHost: ")
            halves.append(half)
        for half in halves[:40]:
            half.settimeout(60)
            with suppress(ConnectionError):
                assert half.recv(1) == b""
        assert server.ask("/_stcore/health", **server.cookie).status == 200
