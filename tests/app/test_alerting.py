"""The server sends alerts to a webhook or a command, and the page Live shows them."""

import json
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from fsdp_inspect_app import alerting
from fsdp_inspect_app.alerting import AlertWatch, send

from fsdp_inspect.analysis.live.alerts import Alert, AlertRule
from fsdp_inspect.server_access import ALERTS_VARIABLE, AlertTarget
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.trace.run import RunStatus
from tests.analysis.live.test_feed import write_steps
from tests.app.test_pages import read
from tests.store.run_files import make_manifest

ALERT = Alert("stall", "llama", 7, "No step ends any more.")


@pytest.fixture
def stalled(tmp_path):
    """A folder with a run whose last step ended an hour ago."""
    create_run(tmp_path / "now", make_manifest(run_id="now"))
    writers = [write_steps(tmp_path / "now", rank, run_id="now", ago_s=3600) for rank in (0, 1)]
    yield tmp_path
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


@pytest.fixture
def webhook():
    """A webhook on this machine: its URL, and what it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_stalled_run_reaches_the_webhook_once(stalled, webhook):
    url, got = webhook
    watch = AlertWatch(stalled, (AlertRule("stall"),), url)
    watch.look()
    watch.look()
    assert [each["text"] for each in got] == ["now, step 2: No step ends any more."]
    assert (got[0]["rule"], got[0]["run"], got[0]["step"]) == ("stall", "now", 2)
    assert [sent.problem for sent in watch.sent] == [""]


def test_a_command_gets_the_alert_on_its_standard_input(tmp_path):
    target = tmp_path / "alert.json"
    code = f"import sys; open({str(target)!r}, 'w').write(sys.stdin.read())"
    assert send(ALERT, shlex.join([sys.executable, "-c", code])) == ""
    assert json.loads(target.read_text())["text"] == "llama, step 7: No step ends any more."


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (shlex.join([sys.executable, "-c", "raise SystemExit(3)"]), "exit code 3"),
        ("no-such-command-of-ours", "could not be sent"),
        ("http://127.0.0.1:1/", "could not be sent"),
    ],
)
def test_an_alert_that_cannot_be_sent_says_why(target, problem):
    assert problem in send(ALERT, target)


def test_the_options_of_the_command_reach_the_server(monkeypatch, tmp_path):
    import msgspec

    asked = AlertTarget("https://example.org/hook", ("memory=90%",))
    monkeypatch.setenv(ALERTS_VARIABLE, msgspec.json.encode(asked).decode())
    watch = AlertWatch()
    monkeypatch.setattr(alerting, "WATCH", watch)
    monkeypatch.setattr(watch, "_watch", lambda: None)
    alerting.start_from_environment(tmp_path)
    assert (watch.folder, watch.target) == (tmp_path, "https://example.org/hook")
    assert [str(rule) for rule in watch.rules] == ["memory=90%"]


def test_the_page_turns_alerts_on_and_shows_them(open_app, stalled, monkeypatch):
    watch = AlertWatch()
    monkeypatch.setattr(alerting, "WATCH", watch)
    monkeypatch.setattr(watch, "_watch", lambda: None)
    app = open_app(stalled, "live", run="now")
    app.checkbox(key="alert stall").check()
    next(each for each in app.button if each.label == "Apply").click().run()
    assert not app.exception
    assert [str(rule) for rule in watch.rules] == ["stall"]
    app.text_input[0].set_value("ftp://example.org")
    next(each for each in app.button if each.label == "Apply").click().run()
    assert "Invalid webhook" in app.error[0].value
    assert watch.target == ""
    watch.look()
    app.run()
    assert "Alert: No step ends any more." in read(app)
