"""`fsdp-inspect plan memory`: compute the peak memory of a step on N ranks, without a GPU."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fsdp_inspect.cli.arguments import (
    AllocatorOption,
    JsonOption,
    parse_allocator,
    parse_memory,
    show_result,
    whole_number,
)
from fsdp_inspect.cli.forecast_maker import TRAINER, collect_settings, make_forecasts
from fsdp_inspect.error_text import shorten
from fsdp_inspect.trace.records import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from fsdp_inspect.analysis.memory.fit import Allowance, DeviceOverhead
    from fsdp_inspect.simulation.planning.builder_predictor import Fit
    from fsdp_inspect.simulation.planning.estimates import PlannedValue
    from fsdp_inspect.store.reader import StoredRun


MAY_NOT_FIT = 1


def forecast(  # noqa: PLR0913 - one argument an option
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="Your own builder: a function that returns a ForecastTarget. Without it, the "
            "trainer's model is forecast, as set by --preset, --hf and --config.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A preset of the trainer: tiny, small, llama-1b, llama-8b, llama-70b."),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(help="A Hugging Face model type, config.json or its folder.", metavar="MODEL"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of trainer settings.", metavar="FILE")
    ] = None,
    world_size: Annotated[
        str, typer.Option(help="Number of ranks, or several such numbers.", metavar="N[,N...]")
    ] = "8",
    gpus_per_node: Annotated[
        int, typer.Option(help="Ranks on one node.", parser=whole_number(1))
    ] = 8,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A keyword for the builder, or a setting of the trainer: --set batch_size=2. "
            "Repeat the option for more settings.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    fit: Annotated[
        int | None,
        typer.Option(
            help="Memory of one device. Finds the fewest ranks and the largest batch that fit, "
            "and changes that make the model fit.",
            metavar="AMOUNT",
            parser=parse_memory,
        ),
    ] = None,
    allowance: Annotated[
        str | None,
        typer.Option(
            help="Device memory that the forecast does not count: allocator, CUDA context, "
            "libraries. Default: an estimate, for --fit on cuda.",
            metavar="AMOUNT",
        ),
    ] = None,
    allowance_from: Annotated[
        Path | None,
        typer.Option(help="Measure the allowance on a recorded GPU run.", metavar="RUN"),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Device whose kernels decide which tensors are saved for backward: cuda or cpu."
        ),
    ] = "cuda",
    allocator: AllocatorOption = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Keep the forecasts as run folders here, for check, compare and the dashboard.",
            metavar="DIR",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace earlier forecasts of the same name in --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Forecast the peak memory of rank 0 of N: by unit, phase and category, without a GPU.

    One training step runs on fake tensors and a fake process group. FSDP2's own code decides what
    is allocated and when, and no arithmetic runs. 8B parameters take seconds and 0.4 GB of memory.

    Exit code with --fit, 0: the step is certain to fit as given, on the first number of ranks. 1:
    it is not, also if more ranks, another batch or a change make it fit. 2: invalid input, or the
    forecast failed.

    Example: `fsdp-inspect plan memory --preset llama-8b --world-size 8,64,512 --fit 80GiB`
    """
    from fsdp_inspect.report.forecast import render_forecast
    from fsdp_inspect.simulation.planning.builder_predictor import collect_forecasts, find_fit
    from fsdp_inspect.simulation.planning.forecast_step import allowance_of, read_forecast, row_of
    from fsdp_inspect.simulation.planning.prediction import predict_device_need

    sizes = _parse_sizes(world_size)
    measured: DeviceOverhead | Allowance | None
    measured, extra = _find_allowance(allowance, allowance_from)
    builder, of_model = _find_model(model, preset, hf, config, set_ or [])
    settings = parse_allocator(allocator)
    if force and out is None:
        raise typer.BadParameter("--force requires --out DIR. Add --out, or omit --force.")
    with make_forecasts(
        builder,
        of_model,
        name=_name_of(builder, of_model),
        gpus_per_node=gpus_per_node,
        device_type=_parse_device(device),
        out=out,
        replaces=force,
    ) as maker:
        runs = [maker.keep(size) for size in sizes]
        found: Fit | None = None
        if fit is not None:
            is_estimated = extra is None and device == "cuda"
            if is_estimated:
                measured = allowance_of(row_of(runs[0], settings))
                extra = measured.bytes

            @cache
            def need_of(run: "StoredRun") -> "PlannedValue":
                if is_estimated:
                    return predict_device_need(read_forecast(run, settings))
                return predict_device_need(read_forecast(run, None), extra or 0)

            def need(size: int, changed: Mapping[str, Any]) -> "PlannedValue":
                return need_of(maker.try_out(size, changed))

            found = find_fit(need, fit, world_size=sizes[0], accepted=maker.accepted)
        shown = collect_forecasts(
            runs, settings=settings, allowance_bytes=extra, allowance=measured, fit=found
        )
    show_result(shown, render_forecast, as_json=as_json)
    if found is not None and not found.fits:
        raise typer.Exit(MAY_NOT_FIT)


def _name_of(builder: str, settings: Mapping[str, Any]) -> str:
    """The name of the forecasts: the builder's name, or the model that the trainer builds."""
    if builder != TRAINER:
        return builder.partition(":")[2]
    given = (settings.get(name) for name in ("preset", "hf", "config"))
    return next((Path(str(one)).stem for one in given if one), "trainer")


def _find_model(
    model: str | None, preset: str | None, hf: str | None, config: Path | None, given: list[str]
) -> tuple[str, dict[str, Any]]:
    of_trainer = {"preset": preset, "hf": hf, "config": str(config) if config else None}
    if model is None:
        settings = collect_settings(given, of_trainer)
        if {"preset", "hf"} <= set(settings):
            raise typer.BadParameter(
                f"The preset {settings['preset']!r} and the Hugging Face model {settings['hf']!r} "
                "are both given. Expected one model. Leave one out.",
                param_hint="--preset",
            )
        return TRAINER, settings
    if options := [name for name, value in of_trainer.items() if value is not None]:
        raise typer.BadParameter(
            f"{model} is a builder of your own, and --{options[0]} is for the trainer's models. "
            "Give one of the two."
        )
    return model, collect_settings(given)


def _parse_sizes(text: str) -> list[int]:
    sizes = [part.strip() for part in text.split(",")]
    number_of_ranks = whole_number(1, MAX_WORLD_SIZE)
    try:
        return list(dict.fromkeys(number_of_ranks(part) for part in sizes))
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint="--world-size") from error


def _parse_amount(option: str, text: str | None) -> int | None:
    from fsdp_inspect.quantities import parse_bytes

    if text is None:
        return None
    amount = parse_bytes(text, needs_unit=True)
    if amount is None:
        raise typer.BadParameter(
            f"{shorten(text)!r} is not an amount of memory with a unit. Expected, for example, "
            "80GiB.",
            param_hint=option,
        )
    return amount


def _parse_device(text: str) -> Literal["cuda", "cpu"]:
    if text == "cuda":
        return "cuda"
    if text == "cpu":
        return "cpu"
    raise typer.BadParameter(f"{text!r} is neither cuda nor cpu.", param_hint="--device")


def _find_allowance(
    given: str | None, run: Path | None
) -> tuple["DeviceOverhead | None", int | None]:
    if run is None:
        return None, _parse_amount("--allowance", given)
    if given is not None:
        raise typer.BadParameter(
            "--allowance and --allowance-from are both given. Expected one of them. Leave one out.",
            param_hint="--allowance",
        )
    from fsdp_inspect.analysis.memory.fit import measure_device_overhead
    from fsdp_inspect.cli.arguments import open_stored_argument

    measured = measure_device_overhead(open_stored_argument(str(run)))
    return measured, measured.bytes
