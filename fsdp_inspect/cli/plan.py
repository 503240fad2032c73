"""`fsdp-inspect plan`: from a budget of GPUs and memory to a plan."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    open_stored_argument,
    parse_memory,
    show_result,
    whole_number,
)
from fsdp_inspect.cli.forecast_maker import TRAINER, ForecastMaker, collect_settings, make_forecasts
from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import ForecastError
from fsdp_inspect.trace.records import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from fsdp_inspect.simulation.planning.candidates import Candidate, Job
    from fsdp_inspect.simulation.planning.forecast_step import ForecastStep
    from fsdp_inspect.simulation.planning.machines import Calibration, PlannedMachine
    from fsdp_inspect.simulation.planning.search import CapacityPlan


DEFAULT_SEQ_LEN = 8192
NONE_FITS = 1


def _count(text: str) -> float:
    """Parse a number of tokens: `15e9`, `2T`, `4M`."""
    scales = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    word = str(text).strip().upper()
    scale = scales.get(word[-1:], 1.0)
    try:
        value = float(word[:-1] if scale > 1 else word) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise typer.BadParameter(
            f"{shorten(str(text))!r} is not a number of tokens. Expected a number from 1, such as "
            "15e9 or 15B."
        )
    return value


def plan(  # noqa: PLR0913 - one argument an option
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset (tiny, small, llama-1b, llama-8b, llama-70b), the config.json of a "
            "Hugging Face model or its folder, or a builder of your own: MODULE:FUNCTION returns "
            "a ForecastTarget.",
            metavar="MODEL",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs.", parser=whole_number(1, MAX_WORLD_SIZE))
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="The machines: h100-nvlink, h200-ib400, a100-ib200, rtx4090-pcie, ... An unknown "
            "name lists all."
        ),
    ] = "h200-ib400",
    tokens: Annotated[
        float, typer.Option(help="Tokens of the training: 15e9, 15B.", parser=_count)
    ] = "15e9",  # type: ignore[assignment]
    memory: Annotated[
        int | None,
        typer.Option(
            help="Memory of one device. [default: that of the preset's GPU]",
            metavar="AMOUNT",
            parser=parse_memory,
        ),
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            help="Memory of one host. [default: no limit]", metavar="AMOUNT", parser=parse_memory
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence. [default: 8192, or less if the model's config says so; the "
            "setting of a builder]",
            parser=whole_number(1, 1 << 24),
        ),
    ] = None,
    batch_tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens of a step over all GPUs: 4M. [default: free, without accumulation]",
            parser=_count,
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(help="GPUs of one node. [default: as in the preset]", parser=whole_number(1)),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A setting that the search does not vary: --set loss=fused; of a builder, a "
            "keyword. Repeat for more. docs/planning.md lists the settings.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    fixed: Annotated[
        bool,
        typer.Option(
            "--fixed",
            help="Evaluate one plan: the settings of --set, all others at their defaults. For "
            "presets and Hugging Face models.",
        ),
    ] = False,
    forecasts: Annotated[
        bool,
        typer.Option(
            "--forecast/--no-forecast",
            help="Forecast the plans to report on fake tensors, with the model of the allocator. "
            "It takes seconds to a minute for each plan.",
        ),
    ] = True,
    calibrate: Annotated[
        str | None,
        typer.Option(help="Take compute times from this recorded run.", metavar="RUN"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write plan.toml, trainer.toml, accelerate.yaml and torchtitan.toml here.",
            metavar="DIR",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files of the same name in --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan that fits a budget, before any run: memory, time, cost, energy.

    It compares wrap, reshard, prefetch, checkpointing, offload, dtypes, HSDP, tensor parallelism
    and batch size. Each value has an interval and its assumption. Exit code 0: a plan fits. 1: no
    plan is certain to fit; the output states what is missing. 2: invalid input.

    With --fixed it evaluates one given plan: `--fixed --set batch_size=2 --set loss=fused`.
    `fsdp-inspect plan memory` forecasts only the peak memory, by unit, phase and category.

    Example: `fsdp-inspect plan --model llama-70b --gpus 64 --preset h200-ib400 --memory 80GiB`
    """
    from fsdp_inspect.report.output import require_free_folder
    from fsdp_inspect.report.planning import render_plan

    if context.invoked_subcommand is not None:
        return
    if model is None or gpus is None:
        missing = "--model" if model is None else "--gpus"
        raise typer.BadParameter(
            "Missing option. Expected a model and a number of GPUs, for example --model llama-8b "
            "--gpus 8.",
            param_hint=missing,
        )
    if out is not None:
        require_free_folder(out, replaces=force)
    _require_whole_nodes(gpus, gpus_per_node)
    machine = _machine(preset, gpus_per_node, memory, host_memory, calibrate)
    question = _Question(
        model=model,
        gpus=gpus,
        preset=preset,
        tokens=tokens,
        seq_len=seq_len,
        batch_tokens=None if batch_tokens is None else round(batch_tokens),
    )
    settings = collect_settings(set_ or [])
    if ":" in model and not Path(model).exists():
        if fixed:
            raise typer.BadParameter(
                f"{model!r} is a builder. Expected a preset or a Hugging Face model. Remove "
                "--fixed: --set fixes the builder's keywords.",
                param_hint="--fixed",
            )
        found = _plan_builder(question, machine, settings)
    else:
        found = _plan_model(question, machine, settings, is_fixed=fixed, forecasts=forecasts)
    show_result(found, render_plan, as_json=as_json)
    if out is not None and found.plan is not None:
        from fsdp_inspect.report.planning import write_settings

        written, notes = write_settings(found, out, replaces=force)
        print(f"Wrote {', '.join(str(path) for path in written)}", file=sys.stderr)
        for note in notes:
            print(note, file=sys.stderr)
    if found.found.best is None:
        raise typer.Exit(NONE_FITS)


def _require_whole_nodes(gpus: int, gpus_per_node: int | None) -> None:
    """Refuse a given size of nodes that leaves GPUs over."""
    if gpus_per_node is not None and gpus > gpus_per_node and gpus % gpus_per_node:
        raise typer.BadParameter(
            f"Nodes of {gpus_per_node} GPUs do not make {gpus} GPUs. Expected a divisor of {gpus}. "
            "Change --gpus-per-node or --gpus.",
            param_hint="--gpus-per-node",
        )


@dataclass(frozen=True, slots=True)
class _Question:
    model: str
    gpus: int
    preset: str
    tokens: float
    seq_len: int | None
    batch_tokens: int | None


def _plan_builder(
    question: _Question, machine: "PlannedMachine", settings: Mapping[str, Any]
) -> "CapacityPlan":
    """Plan a builder of the user's own, with forecasts."""
    from fsdp_inspect.simulation.planning.builder_predictor import make_builder_plan
    from fsdp_inspect.simulation.planning.forecast_step import read_forecast

    name = question.model.partition(":")[2]
    if question.seq_len not in (None, settings.get("seq_len", question.seq_len)):
        raise typer.BadParameter(
            f"--seq-len is {question.seq_len}, and --set seq_len is {settings['seq_len']}. "
            "Expected one value. Leave one out.",
            param_hint="--seq-len",
        )
    per_node = machine.speed.links.gpus_per_node
    with make_forecasts(question.model, settings, name=name, gpus_per_node=per_node) as maker:
        given = dict(settings)
        accepts_seq_len = maker.accepted is None or "seq_len" in maker.accepted
        if question.seq_len is not None and accepts_seq_len:
            given["seq_len"] = question.seq_len
        fixed = {name: value for name, value in given.items() if name not in settings}

        def forecast(gpus: int, changed: Mapping[str, Any]) -> "ForecastStep":
            return read_forecast(maker.try_out(gpus, {**fixed, **changed}))

        return make_builder_plan(
            forecast,
            machine,
            question.preset,
            gpus=question.gpus,
            tokens=question.tokens,
            seq_len=question.seq_len,
            batch_tokens=question.batch_tokens,
            accepted=maker.accepted,
            given=given,
        )


def _plan_model(
    question: _Question,
    machine: "PlannedMachine",
    settings: Mapping[str, Any],
    *,
    is_fixed: bool,
    forecasts: bool,
) -> "CapacityPlan":
    """Plan a preset or a Hugging Face model, with closed formulas."""
    from fsdp_inspect.simulation.planning.candidates import Job, fix_candidate
    from fsdp_inspect.simulation.planning.search import make_capacity_plan
    from fsdp_inspect.simulation.planning.transformer import load_model

    shape, longest = load_model(question.model)
    job = Job(
        model=shape,
        gpus=question.gpus,
        gpus_per_node=machine.speed.links.gpus_per_node,
        seq_len=question.seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN),
        tokens=question.tokens,
        batch_tokens=question.batch_tokens,
    )
    search = partial(
        make_capacity_plan,
        job,
        machine,
        question.preset,
        [fix_candidate(job, settings)] if is_fixed else None,
        settings={} if is_fixed else settings,
    )
    if not forecasts:
        return search()
    with ModelForecasts(job, question.model) as of_plan:
        found = search(forecast=of_plan)
    return replace(found, notes=tuple(of_plan.notes))


def _machine(
    preset: str,
    gpus_per_node: int | None,
    memory: int | None,
    host_memory: int | None,
    calibrate: str | None,
) -> "PlannedMachine":
    from fsdp_inspect.error_text import suggest
    from fsdp_inspect.hardware import GPUS
    from fsdp_inspect.simulation.planning.machines import make_machine

    if preset not in GPUS:
        raise typer.BadParameter(
            f"Unknown preset {shorten(preset)!r}. {suggest(preset, list(GPUS), what='presets')} "
            f"Expected one of {', '.join(GPUS)}.",
            param_hint="--preset",
        )
    measured: Calibration | None = None
    if calibrate is not None:
        from fsdp_inspect.simulation.planning.machines import measure_calibration

        measured = measure_calibration(open_stored_argument(calibrate))
    return make_machine(
        preset,
        gpus_per_node=gpus_per_node,
        memory_bytes=memory,
        host_bytes=host_memory,
        calibration=measured,
    )


# --- Forecast the plans of a preset or a Hugging Face model with the trainer's builder.

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
        """The forecast; None: the trainer does not have a setting of the plan, or it failed."""
        from fsdp_inspect.report.planning import describe_candidate, is_of_trainer
        from fsdp_inspect.simulation.planning.forecast_step import read_forecast

        if not is_of_trainer(candidate):
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
        from fsdp_inspect.report.planning import trainer_settings
        from fsdp_inspect.simulation.planning.transformer import HF_NAMES

        settings = trainer_settings(self._job, candidate)
        settings["offload"] = "cpu" if candidate.offload else "none"  # pinning requires a GPU
        settings["microbatches"] = min(candidate.microbatches, _FORECAST_MICROBATCHES)
        if self._job.model.module_names == HF_NAMES:
            del settings["preset"]
            settings["hf"] = self._model
        return settings
