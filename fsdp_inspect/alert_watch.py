"""Watch the runs that are being recorded, and send alerts to a webhook or a command.

In the dashboard, one thread of the server watches; it starts with `fsdp-inspect app --alert`, or
when a page asks for alerts. A command comes from the command line only, because a page may be open
to other users.

With `fsdp-inspect record --alert`, rank 0 starts `python -m fsdp_inspect.alert_watch FOLDER PID`, a
process with a low priority. It reads the files that the ranks write, so no rank waits for it,
and it ends after the process PID.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_inspect.alert_rules import ALERTS_VARIABLE, AlertRule, AlertTarget
from fsdp_inspect.analysis.live.alerts import Alert, RunAlerts
from fsdp_inspect.analysis.live.monitor import Monitor, choose_ranks
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.store.files import is_url
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus

LOOK_EVERY_S = 5.0
_LIST_EVERY_S = 30.0
"""The time between two searches for new runs."""
_MOST_FOLLOWED = 20
"""The newest runs that are looked at."""
_MOST_KEPT = 50
_NICE = 10
_FOLLOW_EVERY_S = 0.5
"""The interval in which the process of a recording looks whether the recording has ended."""
_CLOCK_S = 2.0
"""The most by which times of files differ from the clock of this process."""
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
    """The alerts of one server, or of one recording."""

    folder: Path | None = None
    rules: tuple[AlertRule, ...] = ()
    target: str = ""
    """An http(s) URL, a command, or empty: alerts are shown on the page Live only."""
    since_unix_s: float = 0.0
    """Runs whose folder has not changed since then are left out. A run that ended since then is
    looked at once; 0: only runs that are being recorded."""
    sent: deque[SentAlert] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    """The last alerts, the newest first."""
    _followed: dict[Path, _Followed] = field(default_factory=dict)
    _ended: set[Path] = field(default_factory=set)
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

    def look_again(self) -> None:
        """Look for new runs, too, however short the time since the last search is."""
        self._listed_s = -_LIST_EVERY_S
        with suppress(FsdpInspectError, OSError):  # the folder does not exist yet
            self.look()

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
                if path.stat().st_mtime < self.since_unix_s:
                    continue
                run = open_run(path)
                is_new = bool(self.since_unix_s) and path not in self._ended
                is_live = run.status is RunStatus.RUNNING
                if path not in self._followed and (is_live or is_new) and run.ranks:
                    monitor = Monitor(choose_ranks(run, None))
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
            self._ended.add(path)
        return alerts


WATCH = AlertWatch()
"""The alerts of this server, which all sessions share."""


def start_from_environment(folder: Path | None) -> None:
    """Start the alerts of `fsdp-inspect app --alert`; other processes do not inherit them."""
    text = os.environ.pop(ALERTS_VARIABLE, None)
    if text is None or folder is None:
        return
    asked = AlertTarget.decode(text)
    WATCH.start(folder, asked.rules, asked.target)


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


def main() -> None:
    """Watch the runs of a folder until the process that records one has ended."""
    folder, pid = Path(sys.argv[1]), int(sys.argv[2])
    asked = AlertTarget.decode(os.environ.pop(ALERTS_VARIABLE))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole job: its end is an alert, too
    os.nice(_NICE)
    watch = AlertWatch(folder, asked.rules, asked.target, time.time() - _CLOCK_S)
    is_over = False
    while not is_over:
        end_s = time.monotonic() + LOOK_EVERY_S
        while not is_over and time.monotonic() < end_s:
            time.sleep(_FOLLOW_EVERY_S)
            is_over = os.getppid() != pid
        watch.look_again()
        while watch.sent:
            problem = watch.sent.pop().problem
            if problem:
                print(f"fsdp_inspect: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
