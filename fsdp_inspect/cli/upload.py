"""`fsdp-inspect upload`: finish the upload of a run to an object store."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable
from fsdp_inspect.cli.cluster import show_count


def upload(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run on this machine.")],
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="The folder of runs in the object store. Default: that of the recorder's "
            "`upload` option.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Upload the missing files of a run to an object store, and verify their sizes.

    The recorder's `upload` option uploads a run while it grows. This command sends the rest after
    an interruption, or a whole run. It skips ranks that still record, because their
    recorders upload them. You can interrupt and repeat it.

    Example: `fsdp-inspect upload runs/demo s3://bucket/runs`
    """
    from fsdp_inspect.report.json import render_json
    from fsdp_inspect.report.outcomes import render_upload
    from fsdp_inspect.store.run_upload import upload_run

    if url is not None and "://" not in url:
        raise typer.BadParameter(
            f"invalid URL: {url!r}. Expected the URL of a folder of runs, such as "
            "s3://bucket/runs.",
            param_hint="URL",
        )
    with show_count("Uploading ranks") as on_progress:
        result = upload_run(run, url, on_progress=on_progress)
    if as_json:
        print(render_json(result))
    else:
        print_renderable(render_upload(result))
