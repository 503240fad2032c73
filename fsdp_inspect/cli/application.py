"""Build the command line from its subcommands: four panels, and the former names of one release."""

import functools
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
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
from fsdp_inspect.cli.record import record
from fsdp_inspect.cli.sections import SECTIONS, show, summary
from fsdp_inspect.cli.simulate import simulate
from fsdp_inspect.cli.tune import tune
from fsdp_inspect.cli.verify import verify
from fsdp_inspect.version import __version__

_Command = Callable[..., None]

_STORE: Mapping[str, _Command] = {
    "index": index,
    "query": query,
    "merge": merge,
    "compact": compact,
    "upload": upload,
    "metrics": metrics,
}
_PANELS: Mapping[str, Mapping[str, _Command | Mapping[str, _Command]]] = {
    "Record": {
        "demo": demo,
        "record": record,
        "import": import_,
        "equivalence": equivalence,
    },
    "Look": {
        "runs": runs,
        "show": show,
        "diagnose": diagnose,
        "compare": compare,
        "export": export,
    },
    "Change": {
        "advise": advise,
        "simulate": simulate,
        "plan": {"": plan, "memory": forecast},
        "tune": tune,
        "verify": verify,
    },
    "Keep": {
        "check": check,
        "store": _STORE,
        "app": app,
        "mcp": mcp,
    },
}
"""The commands in the panels of `--help`. A mapping is a group; its entry "" is its own command."""
_FORMER: Mapping[str, tuple[_Command, str]] = {
    "summary": (summary, "show RUN"),
    **{
        name: (SECTIONS[name], f"show RUN {name}")
        for name in ("breakdown", "exposed", "units", "memory", "ranks", "numerics", "lifetime")
    },
    **{name: (command, f"store {name}") for name, command in _STORE.items()},
    "report": (report, "export RUN html"),
    "forecast": (forecast, "plan memory"),
    "migrate": (advise, "advise RUN --details"),
}
"""Former names, for one release: each with its command and with the name that replaces it."""


class _Plain:
    """Shows no type beside a flag in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of a command."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if isinstance(each, TyperOption) and each.is_flag:
                each.metavar = ""
        return params


class _PlainCommand(_Plain, TyperCommand):
    """A command without types beside flags."""


class _PlainGroup(_Plain, TyperGroup):
    """A group of commands without types beside flags."""


def build_application() -> typer.Typer:
    """The command line with all subcommands."""
    application = _group("Record, inspect and tune PyTorch FSDP runs, one unit at a time.")
    application.info.epilog = "Start with: fsdp-inspect demo"
    application.callback()(_options)
    for panel, commands in _PANELS.items():
        for name, command in commands.items():
            if isinstance(command, Mapping):
                application.add_typer(_build_group(command), name=name, rich_help_panel=panel)
            else:
                _add(application, name, command, rich_help_panel=panel)
    for name, (command, replacement) in _FORMER.items():
        _add(application, name, _tell_name(command, name, replacement), hidden=True)
    return application


def _build_group(commands: Mapping[str, _Command]) -> typer.Typer:
    own = commands.get("")
    group = _group(
        "Index, query, merge, compact and upload folders of runs, and serve their metrics."
    )
    if own is not None:
        group = typer.Typer(cls=_PlainGroup, invoke_without_command=True)
        group.callback(subcommand_metavar="[memory]")(add_shared_options(own))
    for name, command in commands.items():
        if name:
            _add(group, name, command)
    return group


def _group(text: str) -> typer.Typer:
    return typer.Typer(
        cls=_PlainGroup,
        help=text,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )


def _add(group: typer.Typer, name: str, command: _Command, **options: Any) -> None:
    settings = getattr(command, "context_settings", None)
    group.command(name, cls=_PlainCommand, context_settings=settings, **options)(
        command if settings else add_shared_options(command)
    )


def _tell_name(command: _Command, name: str, replacement: str) -> _Command:
    """The command, which first prints the name that replaces its own."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        print(
            f"fsdp-inspect: `{name}` is now `fsdp-inspect {replacement}`. The next release removes "
            "the old name.",
            file=sys.stderr,
        )
        command(**values)

    return cast(_Command, run)


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
