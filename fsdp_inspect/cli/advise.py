"""`fsdp-inspect advise`: what should be changed about a run, and what does each change bring?"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable

if TYPE_CHECKING:
    from fsdp_inspect.trace.plan import Plan

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
        typer.Option(help="Write the fastest plan within the limit, to run it.", metavar="FILE"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rank what to change: first what no plan mends, then plans by predicted gain.

    Every plan is played from the recorded run. Savings are told change by change and add up.

    Example: `fsdp-inspect advise runs/demo --memory-limit 80GiB --write plan.toml`
    """
    from fsdp_inspect.advice.advise import Wishes
    from fsdp_inspect.digest.advising import advise_run
    from fsdp_inspect.report.json import render_json

    wishes = Wishes(
        memory_limit=_parse_limit(memory_limit),
        allow_dtypes=allow_dtypes,
        run_name=run,
        plan_file=str(write or "plan.toml"),
    )
    if write is not None and write.exists():
        raise typer.BadParameter(f"{write} exists. Name a new file.", param_hint="--write")
    source = open_run_argument(run)
    with _progress() as on_play:
        advice = advise_run(source, wishes, on_play=on_play)
    if write is not None:
        _write(advice.chosen, write, advice.refusal)
    if as_json:
        print(render_json(advice))
        return
    from fsdp_inspect.report.advice import render_advice

    print_renderable(render_advice(advice))


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


def _write(plan: "Plan | None", path: Path, refusal: str | None) -> None:
    if plan is None:
        raise typer.BadParameter(f"There is no plan to write: {refusal}", param_hint="--write")
    plan.dump(path)


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
