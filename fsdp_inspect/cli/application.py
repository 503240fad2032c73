"""Build the command line from its subcommands."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer
from typer.main import get_command

from fsdp_inspect.cli.advise import advise
from fsdp_inspect.cli.app import app
from fsdp_inspect.cli.arguments import add_shared_options
from fsdp_inspect.cli.check import check
from fsdp_inspect.cli.compare import compare
from fsdp_inspect.cli.demo import demo
from fsdp_inspect.cli.diagnose import diagnose
from fsdp_inspect.cli.equivalence import equivalence
from fsdp_inspect.cli.export import export, report
from fsdp_inspect.cli.folders import compact, index, mcp, merge, query, runs, upload
from fsdp_inspect.cli.forecast import forecast
from fsdp_inspect.cli.import_ import import_
from fsdp_inspect.cli.metrics import metrics
from fsdp_inspect.cli.plan import plan
from fsdp_inspect.cli.sections import (
    breakdown,
    exposed,
    kernels,
    lifetime,
    memory,
    numerics,
    ranks,
    summary,
    units,
)
from fsdp_inspect.cli.simulate import simulate
from fsdp_inspect.cli.tune import tune
from fsdp_inspect.cli.verify import verify
from fsdp_inspect.version import __version__

_COMMANDS = (
    demo,
    runs,
    index,
    query,
    summary,
    diagnose,
    lifetime,
    exposed,
    units,
    kernels,
    numerics,
    equivalence,
    memory,
    ranks,
    compare,
    simulate,
    advise,
    verify,
    tune,
    forecast,
    plan,
    check,
    import_,
    compact,
    merge,
    upload,
    export,
    metrics,
    mcp,
    report,
    app,
)


def build_application() -> typer.Typer:
    """The command line with all subcommands."""
    application = typer.Typer(
        help="Record, inspect and tune PyTorch FSDP runs, one unit at a time.",
        epilog="Start with: fsdp-inspect demo",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    application.callback()(_options)
    for command in _COMMANDS:
        application.command(command.__name__.rstrip("_"))(add_shared_options(command))
    application.command(hidden=True)(add_shared_options(breakdown))
    application.command("migrate", hidden=True)(add_shared_options(advise))
    return application


@cache
def build_command() -> Callable[..., Any]:
    """The command line as one function, which parses `sys.argv`, runs the command and exits."""
    return get_command(build_application())


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda asked: _print_version(asked),
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Record, inspect and tune PyTorch FSDP runs, one unit at a time."""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fsdp-inspect {__version__}")
        raise typer.Exit
