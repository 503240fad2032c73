"""`fsdp-inspect store metrics`: printed, as a file, and for a live run."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack, closing, suppress

import pytest

from fsdp_inspect.cli import metrics
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.trace.run import RunStatus
from tests.analysis.live.test_feed import AHEAD_S, append_steps, write_steps
from tests.openmetrics import parse
from tests.store.run_files import make_manifest

PATIENCE_S = 300


def test_the_numbers_of_a_run_are_printed_once(invoke, runs_folder):
    ended = invoke("store", "metrics", runs_folder / "four", "--once", "--ranks", "1,3")

    found = parse(ended.out)
    assert ended.code == 0
    ranks = {labels["rank"] for labels, _ in found["fsdp_exposed_seconds"].samples}
    assert ranks == {"1", "3"}
    assert found["fsdp_run_state"].value(fsdp_run_state="ended") == 1


def test_an_export_is_the_same_text(invoke, runs_folder, tmp_path):
    out = tmp_path / "four.prom"
    ended = invoke("export", runs_folder / "four", "--format", "openmetrics", "--out", out)
    printed = invoke("store", "metrics", runs_folder / "four", "--once").out

    assert ended.code == 0
    assert "samples of" in ended.out
    assert out.read_text() == printed
    refused = invoke("export", runs_folder / "four", "--format", "openmetrics", "--out", out)
    assert (refused.code, out.read_text()) == (1, printed)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--ranks", "9"), 1, "Rank 9 not found"),
        (("--ranks", "x"), 2, "invalid number or range 'x'"),
        (("--port", "70000"), 2, "65535"),
    ],
    ids=["no such rank", "no rank", "no port"],
)
def test_wrong_use_is_explained(invoke, runs_folder, arguments, code, message):
    ended = invoke("store", "metrics", runs_folder / "four", "--once", *arguments)

    assert ended.code == code
    assert message in " ".join(ended.err.split())


def test_steps_cannot_be_chosen_for_metrics(invoke, runs_folder, tmp_path):
    out = tmp_path / "four.prom"
    given = ("--format", "openmetrics", "--out", out, "--steps", "2")
    ended = invoke("export", runs_folder / "four", *given)

    assert (ended.code, out.exists()) == (2, False)
    assert "covers all timed steps" in " ".join(ended.err.split())


@pytest.fixture
def recorded(tmp_path):
    """A live run, and the writer of its rank 0."""
    path = tmp_path / "run"
    create_run(path, make_manifest())
    writers = [write_steps(path, rank, num_steps=3) for rank in (0, 1)]
    yield path, writers[0]
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


@pytest.fixture
def address(recorded):
    """The address of a server of that run."""
    command = [sys.executable, "-m", "fsdp_inspect", "store", "metrics", recorded[0], "--port", "0"]
    command += ["--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield re.search(r"http://(\S+)/metrics", server.stdout.readline())[1]
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE_S) == 130


def test_a_run_that_goes_on_is_followed(recorded, address):
    _, writer = recorded
    first = scrape(address)
    assert first["fsdp_run_state"].value(fsdp_run_state="running") == 1
    assert first["fsdp_last_step"].value(rank="0") == 2

    begun_ns = writer.record.clock_start.monotonic_ns + AHEAD_S * 10**9
    append_steps(writer, range(3, 5), begun_ns=begun_ns)
    second = scrape(address)
    assert second["fsdp_last_step"].value(rank="0") == 4
    assert second["fsdp_last_step"].value(rank="1") == 2

    assert status(address, "/") == 404
    assert status(address, "/metrics", host="evil.example") == 403
    port = address.rpartition(":")[2]
    assert status(address, "/metrics", host=f"localhost:{port}") == 200
    assert status(address, "/metrics", host="localhost:1") == 403
    assert status(address, "/metrics", origin="http://evil.example") == 403
    assert status(address, "/metrics", origin=f"http://localhost:{port}") == 200


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return parse(answer.read().decode())


def status(address, path, **headers):
    with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


def serve_in_thread(server, token):
    arguments = (server, lambda: "# EOF\n", "127.0.0.1", None, token, "RUN")
    threading.Thread(target=metrics._serve, args=arguments, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"


def test_with_a_token_metrics_need_it_in_the_url_or_as_a_bearer(capsys):
    with metrics._listen("127.0.0.1", 0) as server:
        address = serve_in_thread(server, token="t" * 20)
        assert status(address, "/metrics") == 403
        assert f"http://{address}/metrics?token={'t' * 20} " in capsys.readouterr().out
        assert status(address, "/") == 403
        assert status(address, "/metrics?token=wrong") == 403
        assert status(address, f"/metrics?token={'t' * 20}") == 200
        assert status(address, "/metrics", authorization=f"Bearer {'t' * 20}") == 200
        assert status(address, "/metrics", authorization=f"Basic {'t' * 20}") == 403
        wrong_host = {"host": "evil.example", "authorization": f"Bearer {'t' * 20}"}
        assert status(address, "/metrics", **wrong_host) == 403
        server.shutdown()


def test_a_taken_port_is_told(runs_folder, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = command("store", "metrics", runs_folder / "four", "--port", port)

    assert ended.code == 1
    assert "Cannot listen on 127.0.0.1" in ended.err


def test_an_address_that_others_reach_says_what_that_exposes(invoke, runs_folder, monkeypatch):
    class Silent:
        """A server that does not listen."""

        def __init__(self, address, handler):
            self.server_address = address

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def serve_forever(self):
            raise SystemExit(0)

    monkeypatch.setattr("fsdp_inspect.cli.metrics._BoundedServer", Silent)
    monkeypatch.setattr("fsdp_inspect.server_access.may_have_other_users", lambda: False)
    ended = invoke("store", "metrics", runs_folder / "four", "--host", "0.0.0.0", "--port", "1234")

    assert "everyone who has the token and reaches port 1234" in ended.err
    assert "Nothing is encrypted" in ended.err
    assert "http://127.0.0.1:1234/metrics?token=" in ended.out
    assert invoke("store", "metrics", runs_folder / "four", "--port", "1234").err == ""


def test_requests_that_are_never_finished_are_closed(monkeypatch):
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.5)
    before = threading.active_count()
    with metrics._listen("127.0.0.1", 0) as server:
        serve_in_thread(server, token=None)
        with ExitStack() as opened:
            connections = [
                opened.enter_context(socket.create_connection(server.server_address))
                for _ in range(50)
            ]
            for connection in connections:
                with suppress(ConnectionError):  # on a busy machine it may be closed already
                    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")
            assert all(is_closed(connection) for connection in connections)
        monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", PATIENCE_S)
        assert status(f"127.0.0.1:{server.server_address[1]}", "/metrics") == 200
        server.shutdown()
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def is_closed(connection):
    """Whether the server closes the connection without an answer."""
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def server(monkeypatch):
    """A server with at most two connections."""
    monkeypatch.setattr(metrics, "MAX_CONNECTIONS", 2)
    with metrics._listen("127.0.0.1", 0) as running:
        serve_in_thread(running, token=None)
        yield running
        running.shutdown()


def test_a_request_that_arrives_byte_by_byte_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 1.0)
    with socket.create_connection(server.server_address) as slow:
        deadline = time.monotonic() + PATIENCE_S
        while not is_closed_after(slow, b"G"):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def is_closed_after(connection, content):
    try:
        connection.sendall(content)
    except OSError:
        return True
    return False


def test_a_scrape_is_answered_while_others_send_half_a_request(server, monkeypatch):
    monkeypatch.setattr(
        metrics, "REQUEST_TIMEOUT_S", PATIENCE_S
    )  # only the limit closes connections
    address = f"127.0.0.1:{server.server_address[1]}"
    with ExitStack() as opened:
        halves = [
            opened.enter_context(socket.create_connection(server.server_address)) for _ in range(6)
        ]
        assert all(is_closed(each) for each in halves[:4])
        assert status(address, "/metrics") == 200
        assert is_closed(halves[4])


def test_connections_above_the_limit_are_closed_and_later_ones_answered(server, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(
        metrics, "_find_refusal", lambda *_: "" if goes_on.wait(PATIENCE_S) else "late"
    )
    with ExitStack() as opened:
        for _ in range(2):
            busy = opened.enter_context(socket.create_connection(server.server_address))
            busy.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + PATIENCE_S
        while server._incomplete and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_closed(opened.enter_context(socket.create_connection(server.server_address)))
        goes_on.set()
    address = f"127.0.0.1:{server.server_address[1]}"
    deadline = time.monotonic() + PATIENCE_S
    while not is_answered(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_answered(address):
    """Whether a connection is free; the server notices the end of a client a little later."""
    try:
        return status(address, "/metrics") == 200
    except (ConnectionError, http.client.BadStatusLine):
        return False
