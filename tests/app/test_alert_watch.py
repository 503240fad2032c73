"""A server or a recording sends alerts to a webhook or a command, and the page Live shows them."""

import json
import os
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fsdp_inspect import alert_watch
from fsdp_inspect.alert_rules import ALERTS_VARIABLE, AlertRule, AlertTarget
from fsdp_inspect.alert_watch import AlertWatch, send
from fsdp_inspect.analysis.live.alerts import Alert
from fsdp_inspect.recording.launcher import parse_arguments
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
    asked = AlertTarget.read("https://example.org/hook", ["memory=90%"])
    assert asked is not None
    monkeypatch.setenv(ALERTS_VARIABLE, asked.encode())
    watch = AlertWatch()
    monkeypatch.setattr(alert_watch, "WATCH", watch)
    monkeypatch.setattr(watch, "_watch", lambda: None)
    alert_watch.start_from_environment(tmp_path)
    assert (watch.folder, watch.target) == (tmp_path, "https://example.org/hook")
    assert [str(rule) for rule in watch.rules] == ["memory=90%"]


def test_the_page_turns_alerts_on_and_shows_them(open_app, stalled, monkeypatch):
    watch = AlertWatch()
    monkeypatch.setattr(alert_watch, "WATCH", watch)
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


def test_the_page_keeps_the_limits_that_its_form_does_not_show(open_app, stalled, monkeypatch):
    rules = tuple(map(AlertRule.parse, ("memory=80%", "memory=95%", "nan")))
    watch = AlertWatch(stalled, rules)
    monkeypatch.setattr(alert_watch, "WATCH", watch)
    monkeypatch.setattr(watch, "_watch", lambda: None)
    app = open_app(stalled, "live", run="now")
    app.number_input(key="limit memory").set_value(90)
    next(each for each in app.button if each.label == "Apply").click().run()
    assert sorted(map(str, watch.rules)) == ["memory=80%", "memory=90%", "nan"]
    app.checkbox(key="alert memory").uncheck()
    next(each for each in app.button if each.label == "Apply").click().run()
    assert [str(rule) for rule in watch.rules] == ["nan"]


@pytest.mark.parametrize(
    ("target", "rules", "problem"),
    [
        (None, ["stall"], "No target of alerts is given"),
        ("mail", ["mist"], "Invalid alert: 'mist'"),
        ("mail", ["memory=95"], "Invalid limit of the alert"),
    ],
)
def test_invalid_alerts_of_a_recording_are_refused(target, rules, problem, capsys):
    options = [] if target is None else ["--alert", target]
    options += [word for rule in rules for word in ("--alert-if", rule)]
    with pytest.raises(SystemExit, match="2"):
        parse_arguments([*options, __file__])
    assert problem in capsys.readouterr().err


def test_a_run_that_ended_before_the_first_look_is_reported_once(stalled, webhook):
    """Its folder is new, and another run of the folder is older than the recording."""
    url, got = webhook
    create_run(stalled / "old", make_manifest(run_id="old"))
    write_steps(stalled / "old", 0, run_id="old", ago_s=10).close(RunStatus.FAILED)
    os.utime(stalled / "old", (1.0, 1.0))
    create_run(stalled / "new", make_manifest(run_id="new"))
    write_steps(stalled / "new", 0, run_id="new", ago_s=10).close(RunStatus.FAILED)
    watch = AlertWatch(stalled, (AlertRule("stall"),), url, since_unix_s=2.0)
    watch.look_again()
    watch.look_again()
    assert sorted(each["run"] for each in got) == ["new", "now"]
