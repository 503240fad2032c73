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
    from fsdp_inspect.cli.compare import open_sides
    from fsdp_inspect.errors import ExportError
    from fsdp_inspect.report import html
    from fsdp_inspect.report.json import render_json
    from fsdp_inspect.report.output import whole_file

    if out.suffix not in (".html", ".htm"):
        raise ExportError(
            f"A report cannot be called {out.name!r}. Expected a name that ends in .html, by which "
            f"a browser knows it. Give for example --out {out.name}.html"
        )
    with whole_file(out, replaces=force) as place:
        if len(runs) == 1:
            contents = html.read_contents(open_run_argument(runs[0]))
            page, shown = html.render_run(contents), [contents.digest.run_id]
        else:
            compared = html.read_comparison(open_sides(runs))
            page = html.render_comparison(compared)
            shown = [digest.run_id for digest in compared.digests]
        place.write_text(page, encoding="utf-8")
    if as_json:
        print(render_json(html.describe_page(page, out, shown)))
        return
    print(f"Wrote {out}. Open it in a browser: it needs nothing else.")
