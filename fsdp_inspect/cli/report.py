"""`fsdp-inspect report`: write a run or a comparison of runs as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, open_stored_argument


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
    """Write an HTML report of one run, or of a comparison of several.

    The file is self-contained: it loads nothing and runs no script. The report of one run shows
    the verdict, the breakdown, exposed communication, memory, ranks, the plan and the environment.
    A comparison shows the differences in settings, metrics and units, and which are noise.

    Example: `fsdp-inspect report runs/demo --out demo.html`

    Example: `fsdp-inspect report runs/before runs/after --out change.html`
    """
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
