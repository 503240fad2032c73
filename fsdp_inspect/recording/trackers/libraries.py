"""One class per tracker: Weights & Biases, MLflow, TensorBoard, Comet, Trackio and OpenTelemetry.

`attach` runs in the training's thread and only looks for an active run of the user. All other
methods run in a background thread: they may be slow, hang or raise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PREFIX = "fsdp/"
"""The beginning of the names of all metrics."""
STEP = f"{PREFIX}step"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The recording that a tracker's run links to."""

    run_id: str
    folder: Path
    url: str | None
    """The page of the run in the dashboard; None if no dashboard is known."""

    def links(self) -> dict[str, str]:
        """The links by name."""
        known = {
            "fsdp_inspect.run_id": self.run_id,
            "fsdp_inspect.run_folder": str(self.folder),
            "fsdp_inspect.command": f"fsdp-inspect app {self.folder.parent}",
        }
        return known if self.url is None else {**known, "fsdp_inspect.dashboard": self.url}


class Tracker(Protocol):
    """Logs numbers to one tracker."""

    def attach(self) -> None:
        """Remember the active run of the user, if there is one."""

    def start(self, run: TrackedRun) -> None:
        """Begin to log, and write the links to the recording."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; the names begin with `PREFIX`."""

    def close(self) -> None:
        """Write pending numbers, and end the tracker's run unless the user began it."""


class _RunTracker:
    """A tracker with a run, which `close` ends unless the user began it."""

    def __init__(self) -> None:
        self._run: Any = None
        self._is_own = False

    def close(self) -> None:
        """See `Tracker`."""
        if self._is_own and self._run is not None:
            self._run.finish()


class WeightsAndBiases(_RunTracker):
    """Logs to `wandb.run`, or to a run of its own."""

    def attach(self) -> None:
        """See `Tracker`."""
        self._run = getattr(sys.modules.get("wandb"), "run", None)

    def start(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        import wandb

        if self._run is None:
            self._is_own = True
            # `create_new` leaves `wandb.run` unset, so a later `wandb.init` of the script works.
            self._run = wandb.init(name=run.run_id, reinit="create_new")
        self._run.config.update(run.links(), allow_val_change=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`.

        In the user's run, the numbers join the row that the next `wandb.log` commits: a row of
        their own would advance wandb's step, and wandb would drop the user's smaller steps.
        """
        self._run.log({**values, STEP: step}, commit=self._is_own)


class MLflow:
    """Logs to the active MLflow run, or to a run of its own."""

    def __init__(self) -> None:
        self._run_id: str | None = None
        self._is_own = False
        self._client: Any = None

    def attach(self) -> None:
        """See `Tracker`. MLflow's active run belongs to a thread."""
        mlflow = sys.modules.get("mlflow")
        active = None if mlflow is None else mlflow.active_run()
        self._run_id = None if active is None else active.info.run_id

    def start(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        import mlflow

        self._client = mlflow.MlflowClient()
        if self._run_id is None:
            experiment = mlflow.tracking.fluent._get_experiment_id()
            self._run_id = self._client.create_run(experiment, run_name=run.run_id).info.run_id
            self._is_own = True
        for name, value in run.links().items():
            self._client.set_tag(self._run_id, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """See `Tracker`."""
        if self._is_own:
            self._client.set_terminated(self._run_id)


class TensorBoard:
    """Writes event files into the folder `tensorboard` of the run folder."""

    def __init__(self) -> None:
        self._writer: Any = None

    def attach(self) -> None:
        """See `Tracker`. TensorBoard has no active run."""

    def start(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))
        for name, value in run.links().items():
            self._writer.add_text(name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        if self._writer is not None:
            self._writer.close()


class Comet(_RunTracker):
    """Logs to the running experiment of Comet, or to an experiment of its own."""

    def attach(self) -> None:
        """See `Tracker`."""
        comet = sys.modules.get("comet_ml")
        self._run = None if comet is None else comet.get_running_experiment()

    def start(self, run: TrackedRun) -> None:
        """See `Tracker`. Comet's variables choose the project and whether it is online."""
        import comet_ml

        if self._run is None:
            self._is_own = True
            config = comet_ml.ExperimentConfig(name=run.run_id, **_NO_COMET_EXTRAS)
            self._run = comet_ml.start(mode="create", experiment_config=config)
        self._run.log_others(run.links())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        if self._is_own and self._run is not None:
            self._run.end()


_NO_COMET_EXTRAS: Mapping[str, Any] = {
    "log_code": False,
    "log_graph": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_env_details": False,
    "auto_output_logging": False,
    "parse_args": False,
    "auto_metric_logging": False,
    "auto_param_logging": False,
}
"""An experiment of the recorder has its numbers and links only."""


class Trackio(_RunTracker):
    """Logs to the active run of Trackio, or to a run of its own."""

    def attach(self) -> None:
        """See `Tracker`. Trackio's active run belongs to a thread."""
        active = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
        self._run = None if active is None else active.get()

    def start(self, run: TrackedRun) -> None:
        """See `Tracker`. The configuration of a run is fixed when it begins."""
        if self._run is None:
            import trackio

            self._is_own = True
            self._run = trackio.init(
                project="fsdp-inspect", name=run.run_id, config=run.links(), embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)


class OpenTelemetry:
    """Sends gauges to the collector that the variables `OTEL_EXPORTER_OTLP_*` name."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._gauges: dict[str, Any] = {}

    def attach(self) -> None:
        """See `Tracker`. The provider of the user stays unchanged."""

    def start(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        about = {"service.name": "fsdp-inspect", **run.links()}
        self._provider = MeterProvider(
            [reader], resource=Resource.create(about), shutdown_on_exit=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`. A gauge keeps its last value until the next export."""
        meter = self._provider.get_meter("fsdp_inspect")
        for name, value in {**values, STEP: step}.items():
            dotted = name.replace("/", ".")
            if dotted not in self._gauges:
                self._gauges[dotted] = meter.create_gauge(dotted)
            self._gauges[dotted].set(value)

    def close(self) -> None:
        """See `Tracker`."""
        if self._provider is not None:
            self._provider.shutdown(timeout_millis=5000)


TRACKERS: Mapping[str, type[Tracker]] = {
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "comet": Comet,
    "trackio": Trackio,
    "otel": OpenTelemetry,
}
"""The trackers by their names in `log_to`."""
