"""`fsdp-inspect report`: a run, or several side by side, as one HTML file to keep and to send."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, open_run_argument


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...]",
            help="One run, or several to compare; the first is the reference. A folder of several "
            "runs of the same settings stands for one side of repeats.",
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

    The file needs nothing but itself: it loads nothing, runs no script, and reads in light, in
    dark and on paper. One run: the verdict, where a step goes, who is waited for and why, memory,
    ranks, the plan, the environment, and how every number was obtained. Several: what differs in
    their settings, what it changed and whether that is noise, unit by unit.

    Example: `fsdp-inspect report runs/demo --out demo.html`

    Example: `fsdp-inspect report runs/before runs/after --out change.html`
    """
    from fsdp_inspect.report.output import whole_file

    if out.suffix not in (".html", ".htm"):
        raise typer.BadParameter(
            f"a report cannot be called {out.name!r}. Expected a name that ends in .html, by which "
            f"a browser knows it. Give for example --out {out.name}.html",
            param_hint="--out",
        )
    make = _report_run if len(runs) == 1 else _report_sides
    with whole_file(out, replaces=force) as place:
        page, described = make(runs, out)
        place.write_text(page, encoding="utf-8")
    if as_json:
        print(described)
    else:
        print(f"Wrote {out}. Open it in a browser: it needs nothing else.")


def _report_run(runs: list[str], out: Path) -> tuple[str, str]:
    """The page of one run, and what programs want to know of it."""
    from fsdp_inspect.report import html
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(runs[0])
    page = html.render_run(html.read_contents(opened))
    written = html.describe_page(page, out, [opened.manifest.run_id])
    return page, render_run_json(opened, written)


def _report_sides(runs: list[str], out: Path) -> tuple[str, str]:
    """The page of a comparison, and what programs want to know of it."""
    from fsdp_inspect.cli.compare import open_sides
    from fsdp_inspect.report import html
    from fsdp_inspect.report.json import render_json

    compared = html.read_comparison(open_sides(runs))
    page = html.render_comparison_page(compared)
    shown = [digest.run_id for digest in compared.digests]
    return page, render_json(html.describe_page(page, out, shown))
