"""Each tracker gets the steps, offline, in its real library: run by `make trackers`."""

import json
import sqlite3
import struct
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.studies.trackers.tracked import losses_of, run_tracked
from tests.studies.trackers.tracked_script import NUM_STEPS

pytestmark = pytest.mark.trackers
STEPS = list(range(NUM_STEPS))
LINK = "http://127.0.0.1:8501/?run=run"


@pytest.fixture(scope="module")
def collector():
    """An OTLP collector on loopback; the list of the requests that it decoded."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                content = gzip.decompress(content)
            requests.append(ExportMetricsServiceRequest.FromString(content))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.requests = requests
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _environment(folder, collector):
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}",
        "COMET_START_ONLINE": "0",
        "COMET_LOGGING_CONSOLE": "ERROR",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "no_proxy": "*",
    }


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, collector):
    """A training with all trackers, which have no active runs."""
    folder = tmp_path_factory.mktemp("tracked")
    names = ("wandb", "mlflow", "tensorboard", "comet", "trackio", "otel")
    (folder / "comet").mkdir()
    ended = run_tracked(folder / "run", *names, environment=_environment(folder, collector))
    assert ended.returncode == 0, ended.stderr
    assert "tracker" not in ended.stderr.replace(sys.prefix, ""), ended.stderr
    return folder, ended


def _wandb_records(content):
    """The records of an offline file: a header of 7 bytes, then a LevelDB log in 32 KiB blocks."""
    place, pieces = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        if kind == 0:
            return
        pieces += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield pieces
            pieces = b""


def _wandb_rows(folder):
    """The rows of the history and the configuration of the only offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows, config = [], {}
    for encoded in _wandb_records(path.read_bytes()):
        record = Record.FromString(encoded)
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(each.nested_key) or each.key: each.value_json for each in items})
        for one in (record.config, record.run.config):
            config.update({each.key or each.nested_key[0]: each.value_json for each in one.update})
    return rows, config


def _mlflow(folder, query):
    with sqlite3.connect(folder / "mlflow.db") as store:
        return store.execute(query).fetchall()


def test_losses_are_those_of_a_training_without_a_recorder(tracked):
    assert losses_of(tracked[1]) == losses_of(run_tracked("none"))


def test_wandb_has_every_step_and_the_link(tracked):
    rows, config = _wandb_rows(tracked[0])
    assert [int(row["fsdp/step"]) for row in rows if "fsdp/step" in row] == STEPS
    assert all(float(row["fsdp/step_time_s"]) > 0 for row in rows)
    assert LINK in str(config)


def test_mlflow_has_every_step_and_the_link(tracked):
    folder = tracked[0]
    steps = _mlflow(folder, "select step from metrics where key='fsdp/exposed_s' order by step")
    assert [step for (step,) in steps] == STEPS
    links = _mlflow(folder, "select value from tags where key='fsdp_inspect.dashboard'")
    assert links == [(LINK,)]
    assert _mlflow(folder, "select status from runs") == [("FINISHED",)]


def test_tensorboard_has_every_step_and_the_link(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked[0] / "run" / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("fsdp/exposed_s")] == STEPS
    assert "fsdp_inspect.dashboard/text_summary" in events.Tags()["tensors"]


def test_comet_has_every_step_and_the_link(tracked):
    (archive,) = (tracked[0] / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as experiment:
        messages = [json.loads(line) for line in experiment.read("messages.json").splitlines()]
    metrics = [each["payload"]["metric"] for each in messages if each["type"] == "metric_msg"]
    assert [one["step"] for one in metrics if one["metricName"] == "fsdp/exposed_s"] == STEPS
    others = [each["payload"] for each in messages if each["type"] == "log_other"]
    assert LINK in [one["value"] for one in others if one["key"] == "fsdp_inspect.dashboard"]


def test_trackio_has_every_step_and_the_link(tracked):
    with sqlite3.connect(tracked[0] / "trackio" / "fsdp-inspect.db") as store:
        rows = store.execute("select step, metrics from metrics order by step").fetchall()
        ((config,),) = store.execute("select config from configs").fetchall()
    assert [step for step, _ in rows] == STEPS
    assert all(json.loads(metrics)["fsdp/step_time_s"] > 0 for _, metrics in rows)
    assert json.loads(config)["fsdp_inspect.dashboard"] == LINK


def test_otel_has_the_last_step_and_the_link(tracked, collector):
    last = {}
    for request in collector.requests:
        for resource in request.resource_metrics:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
                last[metric.name] = metric.gauge.data_points[-1]
    assert (about["service.name"], about["fsdp_inspect.dashboard"]) == ("fsdp-inspect", LINK)
    assert last["fsdp.step"].as_int == NUM_STEPS - 1
    assert last["fsdp.tokens_per_s"].as_double == 1000.0
    assert 0 < last["fsdp.goodput_ratio"].as_double <= 1


def test_active_runs_are_used_and_their_own_steps_stay(tmp_path, collector):
    ended = run_tracked(tmp_path / "run", "--active", "wandb", "mlflow",
                        environment=_environment(tmp_path, collector))  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows, config = _wandb_rows(tmp_path)
    assert [int(row["own"]) for row in rows if "own" in row] == STEPS
    assert any("fsdp/step_time_s" in row for row in rows)
    assert LINK in str(config)
    assert _mlflow(tmp_path, "select name, status from runs") == [("own", "FINISHED")]
    steps = _mlflow(tmp_path, "select step from metrics where key='fsdp/exposed_s' order by step")
    assert [step for (step,) in steps] == STEPS


def test_a_collector_that_is_down_harms_nothing(tmp_path):
    ended = run_tracked(tmp_path / "run", "otel",
                        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
                                     "no_proxy": "*"})  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert losses_of(ended) == losses_of(run_tracked("none"))
