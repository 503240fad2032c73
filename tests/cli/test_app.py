import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from fsdp_inspect.cli import app as app_command
from fsdp_inspect.errors import FsdpInspectError, NotARunError

TOKEN = "a-token-for-this-test"


@pytest.fixture
def executed(monkeypatch):
    """The command that `serve` would execute; it is not executed."""
    commands = []
    monkeypatch.setattr("os.execv", lambda _, command: commands.append(command))
    return commands


def test_the_dashboard_is_served_on_loopback_with_the_given_folder(invoke, executed, tmp_path):
    invoke("app", tmp_path, "--port", "8765", "--no-token")
    options = ["--port", "8765", "--no-token"]
    assert executed == [[sys.executable, "-m", "fsdp_inspect_app", str(tmp_path), *options]]


def test_a_given_host_turns_the_token_on(invoke, executed, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_inspect.server_access.may_have_other_users", lambda: False)
    invoke("app", tmp_path, "--port", "8765")
    assert executed[0][-1] == "--no-token"
    invoke("app", tmp_path, "--port", "8765", "--host", "127.0.0.1")
    assert executed[1][-3:] == ["--host", "127.0.0.1", "--token"]


def test_an_invalid_token_of_the_environment_is_refused(invoke, executed, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_INSPECT_TOKEN", "short")
    ended = invoke("app", tmp_path)
    assert (ended.code, executed) == (1, [])
    assert "Invalid FSDP_INSPECT_TOKEN: 5 characters" in " ".join(ended.err.split())


def test_the_name_of_a_proxy_is_passed_on(invoke, executed, tmp_path):
    invoke("app", tmp_path, "--port", "8765", "--proxy-name", "runs.example.org")
    assert executed[0][-3:-1] == ["--proxy-name", "runs.example.org"]
    ended = invoke("app", tmp_path, "--proxy-name", "https://runs.example.org/path")
    assert (ended.code, len(executed)) == (1, 1)
    assert "Expected a host name without a path" in " ".join(ended.err.split())


def test_without_a_port_the_first_free_one_is_taken(executed, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(app_command, "DEFAULT_PORT", taken.getsockname()[1])
        app_command.serve(tmp_path, port=None, is_token_wanted=False)
        assert int(executed[0][-2]) > taken.getsockname()[1]


def test_a_port_that_is_taken_is_refused(executed, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(FsdpInspectError, match=r"Cannot listen on 127\.0\.0\.1 port .*--port"):
            app_command.serve(tmp_path, host="127.0.0.1", port=taken.getsockname()[1])
    assert executed == []


def test_a_folder_that_is_not_there_is_refused(executed, tmp_path):
    with pytest.raises(NotARunError, match="not found"):
        app_command.serve(tmp_path / "nothing", host="127.0.0.1", port=None)


def test_without_a_folder_the_samples_are_shown(executed):
    app_command.serve(None, host="127.0.0.1", port=None)
    assert executed[0][3].endswith("samples")


def test_without_the_extra_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FsdpInspectError, match=r"pip install 'fsdp-inspect\[app\]'"):
        app_command.serve(tmp_path, host="127.0.0.1", port=None)


@pytest.mark.slow
def test_the_dashboard_comes_up_and_ends_with_the_signal(runs_folder, free_port):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_inspect", "app", str(runs_folder), "--port", str(port)],
        env={**os.environ, "FSDP_INSPECT_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        url = f"http://127.0.0.1:{port}/_stcore/health?token={TOKEN}"
        assert answers(url, process) == b"ok"
        process.send_signal(signal.SIGTERM)
        process.wait(300)
    finally:
        process.kill()
        process.communicate()


def answers(url, process, *, within_s=300):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return response.read()
        except OSError:
            time.sleep(0.2)
    return process.stdout.read() if process.poll() is not None else b"no answer"
