"""`fsdp-inspect export`: export a run for other programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_stored_argument,
    print_renderable,
)

if TYPE_CHECKING:
    from fsdp_inspect.report.openmetrics import MetricsExport
    from fsdp_inspect.report.perfetto import PerfettoExport
    from fsdp_inspect.report.selection import Selection
    from fsdp_inspect.report.tables import TablesExport
    from fsdp_inspect.store.reader import StoredRun

DEFAULT_MAX_MB = 200
_MOST_NUMBERS = 1_000_000


class ExportFormat(StrEnum):
    """What an export is for."""

    PERFETTO = "perfetto"
    CSV = "csv"
    PARQUET = "parquet"
    OPENMETRICS = "openmetrics"


def export(  # noqa: PLR0913 (every option is a parameter)
    run: RunArgument,
    export_format: Annotated[
        ExportFormat, typer.Option("--format", help="What to write.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="perfetto: a file, .json or .json.gz. openmetrics: a file. Others: a folder.",
            show_default=False,
        ),
    ],
    steps: Annotated[
        str | None, typer.Option(metavar="3-5,8", help="Only these steps; all unless given.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="0,1", help="Only these ranks; all unless given.")
    ] = None,
    max_mb: Annotated[
        int,
        typer.Option(
            help="perfetto: refuse a trace that is larger than this, uncompressed.", min=1
        ),
    ] = DEFAULT_MAX_MB,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what an earlier export left at --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run for other programs: a Perfetto trace, its tables, or its numbers for a monitor.

    **perfetto** is a Chrome trace: open it at https://ui.perfetto.dev. A process is a rank; its
    tracks are the step, the main thread or compute stream with every exposed wait, and each kind
    of collective. Arrows lead from the issue to the collective and to where its result was taken;
    memory and device samples are counters. Keep it small: 50 MB opens at once.

    **csv** and **parquet** write events, memory, devices, scalars, summary, steps and units, one
    file each, with words instead of codes and the unit of measure in each column's name. Times are
    ns on the recording rank's own clock.

    **openmetrics** is a text file of what `fsdp-inspect metrics` serves: the numbers of the typical
    step, for a monitoring system.

    Nothing is left behind when it is interrupted.

    Example: `fsdp-inspect export runs/demo --format perfetto --steps 10-12 --out demo.json.gz`

    Example: `fsdp-inspect export runs/demo --format csv --ranks 0 --out demo-tables`
    """
    from fsdp_inspect.report.export import render_export
    from fsdp_inspect.report.json import render_run_json
    from fsdp_inspect.report.selection import select

    opened = open_stored_argument(run)
    selection = select(
        opened,
        ranks=parse_numbers(ranks, option="--ranks"),
        steps=parse_numbers(steps, option="--steps"),
    )
    result: PerfettoExport | TablesExport | MetricsExport
    with _progress(f"Writing {out}") as progress:
        if export_format is ExportFormat.PERFETTO:
            result = _export_trace(opened, selection, out, max_mb, progress, replaces=force)
        elif export_format is ExportFormat.OPENMETRICS:
            result = _export_metrics(opened, selection, out, replaces=force)
        else:
            result = _export_tables(opened, selection, out, export_format, progress, replaces=force)
    if as_json:
        print(render_run_json(opened, result))
    else:
        print_renderable(render_export(result))


Progress = Callable[[int, int], None]


def _export_trace(
    run: "StoredRun",
    selection: "Selection",
    out: Path,
    max_mb: int,
    progress: Progress,
    *,
    replaces: bool,
) -> "PerfettoExport":
    from fsdp_inspect.report.output import whole_file
    from fsdp_inspect.report.perfetto import write_perfetto

    if not out.name.endswith((".json", ".json.gz")):
        raise typer.BadParameter(
            f"a trace cannot be called {out.name!r}. Expected a name that ends in .json or "
            f".json.gz, by which Perfetto knows it. Give for example --out {out.name}.json.gz",
            param_hint="--out",
        )
    with whole_file(out, replaces=replaces) as place:
        return write_perfetto(run, selection, out, place=place, limit_mb=max_mb, progress=progress)


def _export_metrics(
    run: "StoredRun", selection: "Selection", out: Path, *, replaces: bool
) -> "MetricsExport":
    from fsdp_inspect.analysis.live.monitor import monitor_run
    from fsdp_inspect.report.openmetrics import write_openmetrics
    from fsdp_inspect.report.output import whole_file

    if selection.steps is not None:
        raise typer.BadParameter(
            "metrics describe the typical step. Leave it out for --format openmetrics.",
            param_hint="--steps",
        )
    with whole_file(out, replaces=replaces) as place:
        return write_openmetrics(monitor_run(run, selection.ranks), out, place=place)


def _export_tables(
    run: "StoredRun",
    selection: "Selection",
    out: Path,
    export_format: ExportFormat,
    progress: Progress,
    *,
    replaces: bool,
) -> "TablesExport":
    from fsdp_inspect.report.output import whole_folder
    from fsdp_inspect.report.tables import TableFormat, write_tables

    if out.suffix in (".csv", ".parquet"):
        raise typer.BadParameter(
            f"several tables do not fit into one file, {out.name!r}. Expected a folder, which gets "
            f"one file a table. Give for example --out {out.stem}-tables",
            param_hint="--out",
        )
    with whole_folder(out, replaces=replaces) as place:
        return write_tables(
            run,
            selection,
            out,
            place=place,
            table_format=TableFormat(export_format.value),
            progress=progress,
        )


def parse_numbers(text: str | None, *, option: str) -> list[int] | None:
    """Numbers as people list them: `3-5,8` is 3, 4, 5 and 8; None stays None.

    Raises:
        BadParameter: It is no such list.
    """
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = first.strip(), last.strip() if dash else first.strip()
        if not (low.isdecimal() and high.isdecimal()) or int(high) < int(low):
            raise typer.BadParameter(
                f"{part.strip()!r} is no number and no range. Expected for example 3-5,8.",
                param_hint=option,
            )
        if int(high) - int(low) >= _MOST_NUMBERS:
            raise typer.BadParameter(
                f"{part.strip()!r} holds more than {_MOST_NUMBERS} numbers. Give a shorter range.",
                param_hint=option,
            )
        numbers.update(range(int(low), int(high) + 1))
    return sorted(numbers)


@contextmanager
def _progress(description: str) -> Iterator[Progress]:
    """A bar on stderr while the block runs, where someone looks at it."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
