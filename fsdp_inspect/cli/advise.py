"""`fsdp-inspect advise`: what should be changed about a run, and what does each change bring?"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    require_new_file,
)

if TYPE_CHECKING:
    from fsdp_inspect.advice.advise import Advice
    from fsdp_inspect.digest.track_record import TrackRecord
    from fsdp_inspect.store.reader import StoredRun

_QUIET_S = 0.5
"""A search that takes no longer says nothing while it runs."""


def advise(
    run: RunArgument,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Most that a plan's peak may take; the device's memory unless given.",
            metavar="SIZE",
        ),
    ] = None,
    allow_dtypes: Annotated[
        bool, typer.Option("--allow-dtypes", help="Also try bfloat16 messages.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the fastest plan within the limit, to run it, and beside it its "
            "prediction, to verify it: plan.toml, plan.prediction.json.",
            metavar="FILE",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rank what to change: first what no plan mends, then plans by predicted gain.

    Every plan is played from the recorded run. Savings are told change by change and add up. Below
    stands how earlier predictions came out that were verified with the runs of this folder.

    Example: `fsdp-inspect advise runs/demo --memory-limit 80GiB --write plan.toml`
    """
    from fsdp_inspect.advice.advise import Wishes
    from fsdp_inspect.digest.advising import advise_run
    from fsdp_inspect.report.json import render_run_json, to_plain
    from fsdp_inspect.store.predictions import prediction_file_of

    wishes = Wishes(
        memory_limit=_parse_limit(memory_limit),
        allow_dtypes=allow_dtypes,
        run_name=run,
        plan_file=str(write or "plan.toml"),
    )
    for file in (write, write and prediction_file_of(write)):
        require_new_file("--write", file)
    source = open_run_argument(run)
    with _progress() as on_play:
        advice = advise_run(source, wishes, on_play=on_play)
    if write is not None:
        _write(source, advice, write)
    record = _earlier(source, advice)
    if as_json:
        print(render_run_json(source, {**to_plain(advice), "track_record": record.tally}))
        return
    from rich.console import Group

    from fsdp_inspect.report.advice import render_advice
    from fsdp_inspect.report.verification import render_track_record

    print_renderable(Group(render_advice(advice), *render_track_record(record)))


def _parse_limit(text: str | None) -> int | None:
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


def _write(run: "StoredRun", advice: "Advice", path: Path) -> None:
    """The plan, and beside it what is predicted of it."""
    from fsdp_inspect.advice.predictions import Origin, make_prediction
    from fsdp_inspect.simulation.simulate import simulate
    from fsdp_inspect.store.predictions import prediction_file_of, write_prediction

    if advice.plan is None:
        raise typer.BadParameter(
            f"There is no plan to write: {advice.refusal}", param_hint="--write"
        )
    fastest = advice.plan.fastest
    rules = [rule for each in advice.plan.suggestions for rule in each.rules]
    origin = Origin(
        made_by="advise", what=fastest.what, rules=rules, assumptions=fastest.assumptions
    )
    prediction = make_prediction(run, simulate(run, fastest.plan), origin)
    fastest.plan.dump(path)
    write_prediction(prediction, prediction_file_of(path))


def _earlier(run: "StoredRun", advice: "Advice") -> "TrackRecord":
    """How predictions came out that are kept with this run."""
    from fsdp_inspect.advice.predictions import changed_settings
    from fsdp_inspect.digest.track_record import measure_track_record
    from fsdp_inspect.simulation.recorded import observed_plan
    from fsdp_inspect.simulation.scenario import resolve_plan
    from fsdp_inspect.store.ledger import find_ledger, read_ledger
    from fsdp_inspect.trace.prediction import Ledger

    ledger = Ledger() if "://" in run.path else read_ledger(find_ledger(Path(run.path)))
    if advice.plan is None:
        return measure_track_record(ledger)
    recorded = resolve_plan(observed_plan(run), run.manifest)
    changes = changed_settings(recorded, advice.plan.fastest.plan)
    return measure_track_record(ledger, changes=changes)


@contextmanager
def _progress() -> Iterator[Callable[[int], object]]:
    """How many plans were played, on stderr, once it takes long and where someone looks at it."""
    from rich.console import Console

    console = Console(stderr=True)
    begun = time.monotonic()
    with console.status("Playing plans ...") as status:
        status.stop()

        def on_play(count: int) -> None:
            if time.monotonic() - begun > _QUIET_S:
                status.start()
                status.update(f"Playing plans ... {count}")

        yield on_play if console.is_terminal else lambda _: None
