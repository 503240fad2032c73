"""`fsdp-inspect mcp`: serve the runs of a folder to AI assistants."""

from pathlib import Path
from typing import Annotated

import typer


def mcp(
    directory: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A folder of runs.", show_default=True)
    ] = Path("runs"),
) -> None:
    """Serve the runs of a folder to AI assistants, over the Model Context Protocol (stdio).

    The assistant starts this command and asks its tools: the list of runs, the summary, exposed
    communication, memory, the diagnosis, advice, simulations and comparisons. Each answer states
    the origin of its numbers. Only runs below the folder can be opened. Nothing is written.

    Example: `claude mcp add fsdp-inspect -- fsdp-inspect mcp /data/runs`
    """
    from fsdp_inspect.cli.assistant.run_folder import RunFolder
    from fsdp_inspect.errors import FsdpInspectError

    folder = RunFolder(directory.absolute())
    try:
        from fsdp_inspect.cli.assistant.server import serve_tools
    except ModuleNotFoundError as error:
        raise FsdpInspectError(
            f"The package {error.name!r} is not installed. Expected the extra 'mcp'. Install it "
            "with: pip install 'fsdp-inspect[mcp]'"
        ) from error
    serve_tools(folder)
