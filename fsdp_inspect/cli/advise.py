"""`fsdp-inspect advise`: what should be changed about a run, and what does each change bring?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import (
    BandwidthOption,
    JsonOption,
    LatencyOption,
    NodeBandwidthOption,
    NodeLatencyOption,
    RunArgument,
    open_run_argument,
    parse_bandwidth,
    parse_latency,
    parse_node_link,
    parse_time,
    print_renderable,
    require_new_file,
    say_how_to_verify,
)
from fsdp_inspect.cli.progress import show_progress

if TYPE_CHECKING:
    from fsdp_inspect.advice.advise import Advice
    from fsdp_inspect.advice.request import AdviceRequest
    from fsdp_inspect.predictions.track_record import TrackRecord
    from fsdp_inspect.store.reader import StoredRun


def _print_rules(asked: bool) -> None:
    if asked:
        from fsdp_inspect.report.advice import render_rules

        print_renderable(render_rules())
        raise typer.Exit


def advise(  # noqa: PLR0913 - one argument an option
    run: RunArgument,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Most that a plan's peak may take; the device's memory unless given.",
            metavar="SIZE",
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="Longest step of the smallest plan; the recorded one unless given.",
            metavar="TIME",
        ),
    ] = None,
    allow_dtypes: Annotated[
        bool, typer.Option("--allow-dtypes", help="Also try bfloat16 messages.")
    ] = False,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    node_bandwidth: NodeBandwidthOption = None,
    node_latency: NodeLatencyOption = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the fastest plan within the limit, to run it, and beside it its "
            "prediction, to verify it: plan.toml, plan.prediction.json.",
            metavar="FILE",
        ),
    ] = None,
    take: Annotated[
        int | None,
        typer.Option(help="With --write: only the first so many changes.", min=1, metavar="N"),
    ] = None,
    rules: Annotated[
        bool,
        typer.Option(
            "--rules",
            help="List the tuning rules R1 to R34 and what sets each off, then exit.",
            is_eager=True,
            callback=_print_rules,
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Rank what to change: first what no plan mends, then plans by predicted gain.

    Every plan is played from the recorded run. Savings are told change by change and add up. Below
    stands how earlier predictions came out that were verified with the runs of this folder.

    Example: `fsdp-inspect advise runs/demo --memory-limit 80GiB --write plan.toml`
    """
    from fsdp_inspect.advice.request import AdviceRequest
    from fsdp_inspect.advice.run_advice import advise_run
    from fsdp_inspect.predictions.files import prediction_file_of
    from fsdp_inspect.report.json import render_run_json
    from fsdp_inspect.results import to_plain

    wishes = AdviceRequest(
        memory_limit=parse_memory_limit(memory_limit),
        time_limit_ns=_parse_time_limit(time_limit),
        allow_dtypes=allow_dtypes,
        bus_bytes_per_s=parse_bandwidth(bandwidth),
        latency_ns=parse_latency(latency),
        node=parse_node_link(node_bandwidth, node_latency),
        run_name=run,
        plan_file=str(write or "plan.toml"),
    )
    if take is not None and write is None:
        raise typer.BadParameter(
            "It says how many changes the written plan has. Name the file too: --write plan.toml.",
            param_hint="--take",
        )
    for file in (write, write and prediction_file_of(write)):
        require_new_file("--write", file)
    source = open_run_argument(run)
    with show_progress() as on_play:
        advice = advise_run(source, wishes, on_play=on_play)
    if write is not None:
        _write(source, advice, wishes, write, take)
    record = _earlier(source, advice)
    if as_json:
        print(render_run_json(source, {**to_plain(advice), "track_record": record.tally}))
        return
    from rich.console import Group

    from fsdp_inspect.report.advice import render_advice
    from fsdp_inspect.report.verification import render_track_record

    print_renderable(Group(render_advice(advice), *render_track_record(record)))


def parse_memory_limit(text: str | None) -> int | None:
    """Bytes of `--memory-limit`; None: it was not given.

    Raises:
        typer.BadParameter: It is no amount of memory above 0.
    """
    from fsdp_inspect.quantities import parse_bytes

    if text is None:
        return None
    limit = parse_bytes(text)
    if not limit:
        raise typer.BadParameter(
            f"{text!r} is no amount of memory. Expected a number above 0 with a unit, like 80GiB.",
            param_hint="--memory-limit",
        )
    return limit


def _parse_time_limit(text: str | None) -> int | None:
    limit = parse_time("--time-limit", text, "300ms")
    if limit == 0:
        raise typer.BadParameter(
            f"{text!r} is no time for a step. Expected one above 0, like 300ms.",
            param_hint="--time-limit",
        )
    return None if limit is None else round(limit)


def _write(
    run: "StoredRun", advice: "Advice", wishes: "AdviceRequest", path: Path, take: int | None
) -> None:
    """The plan, and beside it what is predicted of it."""
    from fsdp_inspect.predictions.creation import predict_advised
    from fsdp_inspect.predictions.files import prediction_file_of, write_prediction

    if advice.plan is None:
        raise typer.BadParameter(
            f"There is no plan to write: {advice.refusal}", param_hint="--write"
        )
    if take is not None and take > len(advice.plan.suggestions):
        raise typer.BadParameter(
            f"{take} changes are asked for, and {len(advice.plan.suggestions) or 'none'} suggested."
            " Leave it out to write all of them.",
            param_hint="--take",
        )
    prediction = predict_advised(run, advice.plan, wishes, take=take)
    plan = advice.plan.fastest.plan if take is None else advice.plan.suggestions[take - 1].plan
    plan.dump(path)
    write_prediction(prediction, prediction_file_of(path))
    say_how_to_verify(prediction_file_of(path))


def _earlier(run: "StoredRun", advice: "Advice") -> "TrackRecord":
    """How predictions came out that are kept with this run."""
    from fsdp_inspect.predictions.creation import changed_settings
    from fsdp_inspect.predictions.ledger import find_ledger, read_ledger
    from fsdp_inspect.predictions.records import Ledger
    from fsdp_inspect.predictions.track_record import measure_track_record
    from fsdp_inspect.simulation.recorded import observed_plan
    from fsdp_inspect.simulation.scenario import resolve_plan

    ledger = Ledger() if "://" in run.path else read_ledger(find_ledger(Path(run.path)))
    if advice.plan is None:
        return measure_track_record(ledger)
    recorded = resolve_plan(observed_plan(run), run.manifest)
    changes = changed_settings(recorded, advice.plan.fastest.plan)
    return measure_track_record(ledger, changes=changes)
