"""Trackers get the numbers of each step, and a broken one never harms the training."""

import threading
import time

import pytest

from fsdp_inspect.recording.trackers import feed as delivery_module
from fsdp_inspect.recording.trackers.feed import Delivery, check_trackers, page_of
from fsdp_inspect.recording.trackers.libraries import TrackedRun
from tests.studies.trackers.tracked import losses_of, run_tracked


class Tracker:
    """Keeps what it gets; subclasses break one method."""

    def __init__(self):
        self.logged = []

    def attach(self):
        pass

    def start(self, run):
        self.run = run

    def log(self, step, values):
        self.logged.append((step, values))

    def close(self):
        self.is_closed = True


@pytest.fixture
def deliver(tmp_path, monkeypatch):
    monkeypatch.setattr(delivery_module, "MOST_PENDING", 4)
    reports = []

    def start(tracker):
        run = TrackedRun("run", tmp_path / "run", None)
        return Delivery("fake", tracker, run, reports.append), reports

    return start


def test_every_step_is_delivered_before_the_end(deliver):
    tracker = Tracker()
    delivery, reports = deliver(tracker)
    for step in range(3):
        delivery.put(step, {"fsdp/step_time_s": 0.5})
    delivery.end()
    delivery.close(time.monotonic() + 60)
    assert [step for step, _ in tracker.logged] == [0, 1, 2]
    assert (tracker.is_closed, delivery.num_logged, reports) == (True, 3, [])


def test_a_hanging_tracker_takes_no_time_and_its_lost_steps_are_counted(deliver):
    entered, release = threading.Event(), threading.Event()

    class Hanging(Tracker):
        def log(self, step, values):
            entered.set()
            release.wait()

    delivery, reports = deliver(Hanging())
    delivery.put(0, {})
    assert entered.wait(60)
    for step in range(1, 11):  # 4 fit into the queue
        delivery.put(step, {})
    assert delivery.num_dropped == 6
    delivery.end()
    delivery.close(time.monotonic())
    assert "did not finish in time" in reports[0]
    assert "lacks 6 steps, because it was too slow" in reports[1]
    release.set()


@pytest.mark.parametrize("method", ["attach", "start", "log", "close"])
def test_the_first_error_of_a_tracker_is_reported_once(deliver, method):
    tracker = Tracker()

    def fail(*_):
        raise ConnectionError("no network")

    setattr(tracker, method, fail)
    delivery, reports = deliver(tracker)
    for step in range(3):
        delivery.put(step, {})
    delivery.end()
    delivery.close(time.monotonic() + 60)
    assert "The tracker 'fake' failed: ConnectionError: no network." in reports[0]
    lost = {"start": 3, "log": 3}.get(method, 0)
    assert delivery.num_failed == lost
    assert len(reports) == (2 if lost else 1)


def test_a_missing_library_is_explained(deliver):
    tracker = Tracker()

    def fail(run):
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    tracker.start = fail
    delivery, reports = deliver(tracker)
    delivery.end()
    delivery.close(time.monotonic() + 60)
    assert "pip install 'fsdp-inspect[fake]'" in reports[0]


def test_an_unknown_tracker_is_refused():
    with pytest.raises(
        ValueError, match="'wandb', 'mlflow', 'tensorboard', 'comet', 'trackio', 'otel', got 'x'"
    ):
        check_trackers(["wandb", "x"])


def test_the_link_names_the_run():
    assert page_of("http://host:8501/", "a b") == "http://host:8501/?run=a%20b"
    assert page_of(None, "a") is None


@pytest.mark.slow
@pytest.mark.distributed
def test_a_training_feeds_its_trackers_and_keeps_its_losses(tmp_path):
    tracked = run_tracked(tmp_path / "run", "fake", "broken", "hanging")
    assert tracked.returncode == 0, tracked.stderr
    lines = (tmp_path / "run.fake").read_text().splitlines()
    assert lines[:2] == ["attach", "start run http://127.0.0.1:8501/?run=run"]
    assert [int(line.split()[0]) for line in lines[2:-1]] == list(range(12))
    for name in ("step_time_s", "exposed_s", "goodput_ratio", "tokens_per_s"):
        assert f"'fsdp/{name}'" in lines[-2]
    assert lines[-1] == "close"
    assert tracked.stderr.count("The tracker 'broken' failed: ConnectionError: no network.") == 1
    assert "The tracker 'hanging' did not finish in time" in tracked.stderr
    plain = run_tracked("none")
    assert losses_of(tracked) == losses_of(plain)
    assert len(losses_of(plain)) == 12
