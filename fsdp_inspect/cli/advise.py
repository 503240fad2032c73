"""The command `fsdp-inspect advise`: recommend changes of a run."""

import shlex
import sys
from dataclasses import replace
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
    open_stored_argument,
    parse_bandwidth,
    parse_latency,
    parse_memory,
    parse_node_link,
    print_renderable,
    require_new_file,
    say_how_to_verify,
    whole_number,
)
from fsdp_inspect.cli.cluster import DaskOption, open_tasks, show_bars, show_progress

if TYPE_CHECKING:
    from fsdp_inspect.advice.advise import Advice
    from fsdp_inspect.advice.request import AdviceRequest
    from fsdp_inspect.simulation.predictions.ledger import TrackRecord
    from fsdp_inspect.store.reader import StoredRun


def _print_rules(asked: bool) -> None:
    if asked:
        from fsdp_inspect.report.advice import render_rules

        print_renderable(render_rules())
        raise typer.Exit


def advise(  # noqa: PLR0913 - one argument an option
    run: RunArgument,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            help="Highest allowed peak memory of a plan. Default: the memory of the device.",
            metavar="SIZE",
            parser=parse_memory,
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
            help="Write the recommended plan to this file, for example plan.toml. Also writes its "
            "prediction for `verify` (plan.prediction.json) and, if possible, a diff of the script "
            "(plan.patch).",
            metavar="FILE",
        ),
    ] = None,
    take: Annotated[
        int | None,
        typer.Option(
            help="With --write: write only the first N changes.",
            parser=whole_number(1),
            metavar="N",
        ),
    ] = None,
    rules: Annotated[
        bool,
        typer.Option(
            "--rules",
            help="List the tuning rules R1 to R38 with their triggers, then exit.",
            is_eager=True,
            callback=_print_rules,
        ),
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Show all changes and findings, with evidence, simulated plans, assumptions and "
            "earlier predictions. --json always contains them.",
        ),
    ] = False,
    dask: DaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend a change with its gain, memory cost, risk and code.

    Problems that no sharding plan can fix come first, then changes of the plan, each with its
    predicted gain. Every plan is simulated from the recorded run. The gains of the changes add up.
    With `--dask`, workers simulate several plans at once.

    For a run of FSDP1 (FullyShardedDataParallel), `--details` shows what a move to FSDP2 changes:
    settings without a counterpart, all-gathers, memory. `--write plan.toml` also writes the plan
    for FSDP2, plan.fsdp2.toml. It has the same units, strategy and dtypes.

    Example: `fsdp-inspect advise runs/demo --memory-limit 80GiB --write plan.toml`
    """
    from fsdp_inspect.advice.request import AdviceRequest
    from fsdp_inspect.advice.run_advice import advise_run
    from fsdp_inspect.report.json import render_run_json
    from fsdp_inspect.results import to_plain
    from fsdp_inspect.simulation.predictions.ledger import prediction_file_of

    request = AdviceRequest(
        memory_limit=memory_limit,
        allow_dtypes=allow_dtypes,
        bus_bytes_per_s=parse_bandwidth(bandwidth),
        latency_ns=parse_latency(latency),
        node=parse_node_link(node_bandwidth, node_latency),
        run_name=run,
        plan_file=str(write or "plan.toml"),
        is_written=write is not None,
        take=take,
    )
    if take is not None and write is None:
        raise typer.BadParameter(
            "Missing --write: --take limits the changes of the written plan. Expected a file, for "
            "example --write plan.toml.",
            param_hint="--take",
        )
    if write is not None:
        for file in (
            write,
            prediction_file_of(write),
            patch_file_of(write),
            migration_file_of(write),
        ):
            require_new_file("--write", file)
    with open_tasks(dask) as tasks, show_progress() as on_progress:
        source = open_stored_argument(run, show_bars(tasks))
        request = replace(request, run_name=source.label)
        advice = advise_run(source, request, on_progress=on_progress, tasks=tasks)
    if write is not None:
        _write(source, advice, request, write, take)
    record = _earlier(source, advice)
    if as_json:
        print(render_run_json(source, {**to_plain(advice), "track_record": record.tally}))
        return
    from rich.console import Group

    from fsdp_inspect.report.advice import render_advice
    from fsdp_inspect.report.verification import render_track_record

    earlier = render_track_record(record) if details else ()
    print_renderable(Group(render_advice(advice, details=details), *earlier))


def _write(
    run: "StoredRun", advice: "Advice", request: "AdviceRequest", path: Path, take: int | None
) -> None:
    """Write the plan, and its prediction next to it."""
    from fsdp_inspect.advice.prediction_creation import predict_advised
    from fsdp_inspect.simulation.predictions.ledger import prediction_file_of, write_prediction

    if advice.migration is not None:
        other = path if advice.plan is None else migration_file_of(path)
        advice.migration.plan.dump(other)
        print(f"Wrote the plan for FSDP2: {other}. Apply it with apply_plan.", file=sys.stderr)
        if advice.plan is None:
            return
    if advice.plan is None:
        raise typer.BadParameter(
            f"No plan to write. {advice.refusal}",
            param_hint="--write",
        )
    if take is not None and take > len(advice.plan.suggestions):
        raise typer.BadParameter(
            f"Invalid number of changes: {take}. Expected at most "
            f"{len(advice.plan.suggestions)}, the number of suggested changes. Leave out --take to "
            "write all changes.",
            param_hint="--take",
        )
    prediction = predict_advised(run, advice.plan, request, take=take)
    plan = advice.plan.fastest.plan if take is None else advice.plan.suggestions[take - 1].plan
    plan.dump(path)
    count = len(advice.plan.suggestions)
    some = f"the first {take} of {count} changes" if take else f"all {count} changes"
    more = " (--take 1 writes the first one only)" if count > 1 and take is None else ""
    changes = f"{some}{more}" if count > 1 else "the recommended change"
    wrote = (
        f"Wrote the plan with {changes}"
        if count
        else "No change is advised: wrote the plan of the run"
    )
    print(f"{wrote}: {path}", file=sys.stderr)
    write_prediction(prediction, prediction_file_of(path))
    if count and advice.plan.change.diff:
        patch = patch_file_of(path)
        patch.write_text(f"{advice.plan.change.diff}\n", encoding="utf-8")
        print(f"Change the script: patch -p0 < {shlex.quote(str(patch))}", file=sys.stderr)
        print(advice.plan.change.where, file=sys.stderr)
    say_how_to_verify(prediction_file_of(path))


def patch_file_of(plan: Path) -> Path:
    """The file of the diff next to a plan file: `plan.patch`."""
    return plan.with_suffix(".patch")


def migration_file_of(plan: Path) -> Path:
    """The plan for FSDP2 next to the plan of FSDP1: `plan.fsdp2.toml`."""
    return plan.with_suffix(".fsdp2.toml")


def _earlier(run: "StoredRun", advice: "Advice") -> "TrackRecord":
    """The verified predictions next to this run."""
    from fsdp_inspect.advice.prediction_creation import changed_settings
    from fsdp_inspect.simulation.predictions.ledger import (
        find_ledger,
        measure_track_record,
        read_ledger,
    )
    from fsdp_inspect.simulation.predictions.records import Ledger
    from fsdp_inspect.simulation.recorded import observed_plan
    from fsdp_inspect.simulation.scenario import resolve_plan

    ledger = Ledger() if "://" in run.path else read_ledger(find_ledger(Path(run.path)))
    if advice.plan is None:
        return measure_track_record(ledger)
    recorded = resolve_plan(observed_plan(run), run.manifest)
    changes = changed_settings(recorded, advice.plan.fastest.plan)
    return measure_track_record(ledger, changes=changes)
