"""Watch the runs that are being recorded, and send alerts to a webhook or a command.

One thread of the server watches; it starts with `fsdp-inspect app --alert`, or when a page asks for
alerts. A command comes from the command line only, because a page may be open to other users.
"""

import json
import os
import shlex
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fsdp_inspect.analysis.live.alerts import RULES, Alert, AlertRule, RunAlerts
from fsdp_inspect.analysis.live.monitor import Monitor, choose_ranks
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.result_types import RunStatus
from fsdp_inspect.server_access import ALERTS_VARIABLE, AlertTarget
from fsdp_inspect.store.files import is_url
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run

LOOK_EVERY_S = 5.0
_LIST_EVERY_S = 30.0
"""The time between two searches for new runs."""
_MOST_FOLLOWED = 20
"""The newest runs that are looked at."""
_MOST_KEPT = 50
_SEND_S = 15.0
"""The time limit for a webhook or a command."""


@dataclass(frozen=True, slots=True)
class SentAlert:
    """An alert, when it was raised, and why it could not be sent; empty: it was sent."""

    alert: Alert
    unix_s: float
    problem: str


@dataclass
class _Followed:
    monitor: Monitor
    alerts: RunAlerts


@dataclass
class AlertWatch:
    """The alerts of one server."""

    folder: Path | None = None
    rules: tuple[AlertRule, ...] = ()
    target: str = ""
    """An http(s) URL, a command, or empty: alerts are shown on the page Live only."""
    sent: deque[SentAlert] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    """The last alerts, the newest first."""
    _followed: dict[Path, _Followed] = field(default_factory=dict)
    _listed_s: float = -_LIST_EVERY_S
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, folder: Path, rules: Sequence[AlertRule], target: str) -> None:
        """Watch the runs of a folder from now on, under these rules."""
        with self._lock:
            self.folder, self.rules, self.target = folder, tuple(rules), target
            self._followed.clear()
            self._listed_s = -_LIST_EVERY_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="alerts", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            with suppress(FsdpInspectError, OSError):  # the folder is gone for a while
                self.look()
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Look at each run once, and send its new alerts."""
        with self._lock:
            self._find_runs()
            found = [alert for path in [*self._followed] for alert in self._look_at(path)]
            target = self.target
        for alert in found:
            self.sent.appendleft(SentAlert(alert, time.time(), send(alert, target)))

    def _find_runs(self) -> None:
        if self.folder is None or time.monotonic() - self._listed_s < _LIST_EVERY_S:
            return
        self._listed_s = time.monotonic()
        for entry in list_runs(self.folder)[:_MOST_FOLLOWED]:
            path = Path(entry.path)
            with suppress(FsdpInspectError, OSError):
                run = open_run(path)
                if path not in self._followed and run.status is RunStatus.RUNNING and run.ranks:
                    attempt = max(record.attempt for record in run.ranks)
                    monitor = Monitor(path, attempt, choose_ranks(run, None))
                    self._followed[path] = _Followed(monitor, RunAlerts(self.rules))

    def _look_at(self, path: Path) -> list[Alert]:
        followed = self._followed[path]
        try:
            run = open_run(path)
            alerts = followed.alerts.look(followed.monitor.look(run))
        except (FsdpInspectError, OSError):
            return []  # it is being written, or removed
        if run.status is not RunStatus.RUNNING:
            del self._followed[path]
        return alerts


WATCH = AlertWatch()
"""The alerts of this server, which all sessions share."""


def start_from_environment(folder: Path | None) -> None:
    """Start the alerts of `fsdp-inspect app --alert`; other processes do not inherit them."""
    text = os.environ.pop(ALERTS_VARIABLE, None)
    if text is None or folder is None:
        return
    asked = msgspec.json.decode(text, type=AlertTarget)
    rules = [AlertRule.parse(rule) for rule in asked.rules or RULES]
    WATCH.start(folder, rules, asked.target)


def send(alert: Alert, target: str) -> str:
    """Send an alert; returns the problem, or an empty text.

    A webhook gets JSON whose `text` chat services show. A command gets it on its standard input.
    """
    body = {
        "text": alert.text,
        "rule": alert.rule,
        "run": alert.run_id,
        "step": alert.step,
        "sentence": alert.sentence,
    }
    data = json.dumps(body).encode()
    try:
        if not target:
            return ""
        if is_webhook(target):
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(target, data, headers)
            urllib.request.urlopen(request, timeout=_SEND_S).close()
            return ""
        done = subprocess.run(
            shlex.split(target), input=data, timeout=_SEND_S, capture_output=True, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"The alert could not be sent: {error}."
    if done.returncode:
        return f"The command of the alert ended with exit code {done.returncode}."
    return ""


def is_webhook(target: str) -> bool:
    """Whether a target is the address of a webhook."""
    return is_url(target) and target.startswith(("http://", "https://"))
