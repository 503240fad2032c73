"""`fsdp-inspect export`: write a run for other programs, or as one HTML page."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    open_stored_argument,
    show_result,
    whole_number,
)
from fsdp_inspect.error_text import shorten

if TYPE_CHECKING:
    from fsdp_inspect.report.chakra import ChakraExport
    from fsdp_inspect.report.grafana import GrafanaExport
    from fsdp_inspect.report.openmetrics import MetricsExport
    from fsdp_inspect.report.perfetto import PerfettoExport
    from fsdp_inspect.report.selection import Selection
    from fsdp_inspect.report.tables import TablesExport
    from fsdp_inspect.store.reader import StoredRun

DEFAULT_MAX_MB = 200
_MOST_NUMBERS = 1_000_000
_MOST_DIGITS = 10


class ExportFormat(StrEnum):
    """The format of an export."""

    PERFETTO = "perfetto"
    CHAKRA = "chakra"
    CSV = "csv"
    PARQUET = "parquet"
    OPENMETRICS = "openmetrics"
    GRAFANA = "grafana"
    HTML = "html"


_ENDINGS = {
    ExportFormat.PERFETTO: ".perfetto.json.gz",
    ExportFormat.CHAKRA: "-chakra",
    ExportFormat.CSV: "-csv",
    ExportFormat.PARQUET: "-parquet",
    ExportFormat.OPENMETRICS: ".prom",
    ExportFormat.GRAFANA: ".grafana.json",
    ExportFormat.HTML: ".html",
}
"""The ends of the names of exports without `--out`."""


def export(  # noqa: PLR0913 (every option is a parameter)
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... FORMAT",
            help="A run, then perfetto, chakra, csv, parquet, openmetrics, grafana or html. "
            "Several runs and html compare them with the first; a folder of repeats is one side.",
            show_default=False,
        ),
    ],
    format_: Annotated[
        ExportFormat | None, typer.Option("--format", hidden=True, help="The former option.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The file, or the folder for chakra, csv and parquet. Default: the name of the "
            "run here.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="3-5,8", help="Steps to export; default all.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="0,1", help="Ranks to export; default all.")
    ] = None,
    max_mb: Annotated[
        int,
        typer.Option(
            help="Largest uncompressed size of a perfetto trace, in MB.",
            metavar="N",
            parser=whole_number(1),
        ),
    ] = DEFAULT_MAX_MB,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier export at --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a run as a Perfetto trace, tables, metrics or an HTML report.

    **perfetto** writes a Chrome trace for https://ui.perfetto.dev. Each rank is a process with
    tracks for the step, the compute stream or main thread with its exposed waits, and each kind of
    collective. Arrows connect the issue, the collective and the use of its result. Memory and
    device samples are counters. A trace of 50 MB opens quickly. A name that ends in `.pftrace`
    gives Perfetto's own packets (extra `perfetto`).

    **chakra** writes one step as Chakra execution traces, a file for each rank, which simulators
    such as ASTRA-sim replay on another network (extra `chakra`). The step is `--steps N`, or the
    typical one.

    **csv** and **parquet** write one file each for events, memory, devices, scalars, summary, steps
    and units. Codes become names, and the name of a column ends in its unit. Times are ns on the
    clock of the recording rank.

    **openmetrics** writes the numbers that `fsdp-inspect store metrics` serves to a text file.

    **grafana** writes a dashboard that Grafana imports. It shows the metrics of the run from
    Prometheus, which scrapes `fsdp-inspect store metrics`.

    **html** writes one self-contained page, which loads nothing and runs no script: the verdict,
    the breakdown, exposed communication, memory, ranks, the plan and the environment. For several
    runs, it shows what differs and which differences are noise.

    An interrupted export leaves no partial files.

    Example: `fsdp-inspect export runs/demo html`

    Example: `fsdp-inspect export runs/demo perfetto --steps 10-12 --out demo.json.gz`
    """
    from fsdp_inspect.report.outcomes import render_export
    from fsdp_inspect.report.selection import select

    runs, export_format = _read_words(words, format_)
    if export_format is ExportFormat.HTML:
        if steps is not None or ranks is not None:
            raise typer.BadParameter(
                "A report covers all ranks and timed steps. Omit the option.",
                param_hint="--ranks" if steps is None else "--steps",
            )
        report(runs, out or Path(_name_of(runs) + _ENDINGS[export_format]), force, as_json)
        return
    if len(runs) != 1:
        raise typer.BadParameter(
            f"{len(runs)} runs. Expected one for this format. Only html compares runs.",
            param_hint="RUN",
        )
    opened = open_stored_argument(runs[0])
    out = out or Path(_name_of(runs) + _ENDINGS[export_format])
    selection = select(
        opened,
        ranks=parse_numbers(ranks, option="--ranks"),
        steps=parse_numbers(steps, option="--steps"),
    )
    result: PerfettoExport | ChakraExport | TablesExport | MetricsExport | GrafanaExport
    with _progress(f"Writing {out}") as progress:
        if export_format is ExportFormat.PERFETTO:
            result = _export_trace(opened, selection, out, max_mb, progress, replaces=force)
        elif export_format is ExportFormat.CHAKRA:
            result = _export_chakra(opened, selection, out, progress, replaces=force)
        elif export_format in (ExportFormat.OPENMETRICS, ExportFormat.GRAFANA):
            result = _export_metrics(opened, selection, out, export_format, replaces=force)
        else:
            result = _export_tables(opened, selection, out, export_format, progress, replaces=force)
    show_result(result, render_export, as_json=as_json, run=opened)


def _read_words(words: list[str], given: ExportFormat | None) -> tuple[list[str], ExportFormat]:
    """The runs and the format of an export."""
    known = [each.value for each in ExportFormat]
    if given is not None:
        return words, given
    if words[-1] not in known:
        raise typer.BadParameter(
            f"The format is missing after {words[-1]!r}. Expected one of {', '.join(known)} as the "
            f"last word, for example: fsdp-inspect export {words[0]} html",
            param_hint="FORMAT",
        )
    if len(words) == 1:
        raise typer.BadParameter(
            f"The run is missing before {words[0]!r}. Expected a run folder or its URL.",
            param_hint="RUN",
        )
    return words[:-1], ExportFormat(words[-1])


def _name_of(runs: list[str]) -> str:
    """The name of an export: that of the run, or of the compared runs."""
    return "-and-".join(Path(run.rstrip("/")).absolute().name for run in runs)


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

    if not out.name.endswith((".json", ".json.gz", ".pftrace")):
        raise typer.BadParameter(
            f"invalid file name {out.name!r}. Expected a name that ends in .json, .json.gz or "
            f".pftrace. Use, for example, --out {out.name}.json.gz",
            param_hint="--out",
        )
    with whole_file(out, replaces=replaces) as place:
        return write_perfetto(run, selection, out, place=place, limit_mb=max_mb, progress=progress)


def _export_chakra(
    run: "StoredRun", selection: "Selection", out: Path, progress: Progress, *, replaces: bool
) -> "ChakraExport":
    from fsdp_inspect.report.chakra import write_chakra
    from fsdp_inspect.report.output import whole_folder

    with whole_folder(out, replaces=replaces) as place:
        return write_chakra(run, selection, out, place=place, progress=progress)


def _export_metrics(
    run: "StoredRun",
    selection: "Selection",
    out: Path,
    export_format: ExportFormat,
    *,
    replaces: bool,
) -> "MetricsExport | GrafanaExport":
    from fsdp_inspect.analysis.live.monitor import monitor_run
    from fsdp_inspect.diagnosis.diagnose import diagnose
    from fsdp_inspect.report.grafana import write_grafana
    from fsdp_inspect.report.openmetrics import write_openmetrics
    from fsdp_inspect.report.output import whole_file

    if selection.steps is not None:
        raise typer.BadParameter(
            f"{export_format.value} covers all timed steps. Omit --steps.",
            param_hint="--steps",
        )
    write = write_grafana if export_format is ExportFormat.GRAFANA else write_openmetrics
    with whole_file(out, replaces=replaces) as place:
        return write(monitor_run(run, selection.ranks), diagnose(run), out, place=place)


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
            f"{out.name!r} names a file, and there is one file per table. Expected a folder. Use, "
            f"for example, --out {out.stem}-tables",
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
    """Parse a list of numbers and ranges: `3-5,8` is 3, 4, 5 and 8; None stays None.

    Raises:
        BadParameter: The list is invalid.
    """
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = first.strip(), last.strip() if dash else first.strip()
        is_valid = low.isdecimal() and high.isdecimal() and max(len(low), len(high)) < _MOST_DIGITS
        if not is_valid or int(high) < int(low):
            raise typer.BadParameter(
                f"invalid number or range {shorten(part.strip())!r}. Expected, for example, 3-5,8.",
                param_hint=option,
            )
        if int(high) - int(low) >= _MOST_NUMBERS:
            raise typer.BadParameter(
                f"range {part.strip()!r} has more than {_MOST_NUMBERS:,} numbers. Shorten it.",
                param_hint=option,
            )
        numbers.update(range(int(low), int(high) + 1))
    return sorted(numbers)


@contextmanager
def _progress(description: str) -> Iterator[Progress]:
    """Show a progress bar on stderr if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- Write a run or a comparison of runs as one HTML file.


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...]",
            help="One run, or several to compare with the first. A folder of runs with equal "
            "settings is one side of repeats.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The HTML file to write.", show_default=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML report of one run, or of a comparison; the former name of `export RUN html`."""
    from fsdp_inspect.report.output import whole_file

    if out.suffix not in (".html", ".htm"):
        raise typer.BadParameter(
            f"invalid file name {out.name!r}. Expected a name that ends in .html. Use, for "
            f"example, --out {out.name}.html",
            param_hint="--out",
        )
    make = _report_run if len(runs) == 1 else _report_sides
    with whole_file(out, replaces=force) as place:
        page, described = make(runs, out)
        place.write_text(page, encoding="utf-8")
    if as_json:
        print(described)
    else:
        print(f"Wrote {out}. Open it in a browser.")


def _report_run(runs: list[str], out: Path) -> tuple[str, str]:
    """Render the page of one run, and its description as JSON."""
    from fsdp_inspect.report import html
    from fsdp_inspect.report.json import render_run_json

    opened = open_stored_argument(runs[0])
    page = html.render_run(html.read_contents(opened))
    written = html.describe_page(page, out, [opened.manifest.run_id])
    return page, render_run_json(opened, written)


def _report_sides(runs: list[str], out: Path) -> tuple[str, str]:
    """Render the page of a comparison, and its description as JSON."""
    from fsdp_inspect.cli.compare import open_sides
    from fsdp_inspect.report import html
    from fsdp_inspect.report.json import render_json

    compared = html.read_comparison(open_sides(runs))
    page = html.render_comparison_page(compared)
    shown = [summary.run_id for summary in compared.summaries]
    return page, render_json(html.describe_page(page, out, shown))
