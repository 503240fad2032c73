"""Forecast the plans of a preset or a Hugging Face model with the trainer's builder."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fsdp_inspect.cli.forecast_maker import TRAINER, ForecastMaker, make_forecasts
from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import ForecastError

if TYPE_CHECKING:
    from fsdp_inspect.simulation.planning.candidates import Candidate, Job
    from fsdp_inspect.simulation.planning.forecast_step import ForecastStep

_FORECAST_MICROBATCHES = 2
"""Further microbatches do not change the peak."""


class ModelForecasts:
    """Makes the forecast of a plan; starts its process at the first one, ends it with the block."""

    def __init__(self, job: "Job", model: str) -> None:
        """`model`: the value of `--model`."""
        self._job, self._model = job, model
        self._maker: ForecastMaker | None = None
        self._open = ExitStack()
        self.notes: list[str] = []
        """Forecasts that failed."""

    def __enter__(self) -> "ModelForecasts":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __call__(self, candidate: "Candidate") -> "ForecastStep | None":
        """The forecast; None: the trainer does not have tensor parallelism, or it failed."""
        from fsdp_inspect.report.planning import describe_candidate
        from fsdp_inspect.simulation.planning.forecast_step import read_forecast

        if candidate.tensor_parallel > 1:
            return None
        text = describe_candidate(candidate)
        try:
            maker = self._maker or self._start()
            return read_forecast(maker.try_out(self._job.gpus, self._settings(candidate), text))
        except ForecastError as error:
            self.notes.append(f"Not forecast: {text}. {shorten(str(error), 300)}")
            return None

    def _start(self) -> ForecastMaker:
        self._maker = self._open.enter_context(
            make_forecasts(
                TRAINER, {}, name=self._job.model.name, gpus_per_node=self._job.gpus_per_node
            )
        )
        return self._maker

    def _settings(self, candidate: "Candidate") -> dict[str, Any]:
        from fsdp_inspect.report.planning_files import trainer_settings
        from fsdp_inspect.simulation.planning.transformer import HF_NAMES

        settings = trainer_settings(self._job, candidate)
        settings["offload"] = "cpu" if candidate.offload else "none"  # pinning requires a GPU
        settings["microbatches"] = min(candidate.microbatches, _FORECAST_MICROBATCHES)
        if self._job.model.module_names == HF_NAMES:
            del settings["preset"]
            settings["hf"] = self._model
        return settings
