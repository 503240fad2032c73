"""Add the options that every subcommand has."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fsdp_inspect.cli.arguments import parse_memory


def _shared(
    max_memory: Annotated[
        int | None,
        typer.Option(
            "--max-memory",
            help="Memory limit for reading one file of a run. [default: 8GiB]",
            metavar="SIZE",
            parser=parse_memory,
        ),
    ] = None,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of an error, for a bug report.")
    ] = False,
) -> None:
    """Apply the shared options; `cli.main` reads `--traceback` itself."""
    from fsdp_inspect.store.read_limits import VARIABLE

    if max_memory is not None:
        os.environ[VARIABLE] = str(max_memory)


def add_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the shared options as its last parameters."""
    own, shared = inspect.signature(command), inspect.signature(_shared)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        _shared(**{name: values.pop(name) for name in shared.parameters})
        command(**values)

    parameters = [*own.parameters.values(), *shared.parameters.values()]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **_shared.__annotations__}
    return run
