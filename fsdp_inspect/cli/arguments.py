"""Arguments and parsers that several subcommands share."""

import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fsdp_inspect.error_text import shorten

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fsdp_inspect.emulation.allocator.settings import AllocatorSettings
    from fsdp_inspect.parallel.tasks import Tasks
    from fsdp_inspect.run import Run
    from fsdp_inspect.simulation.network import NodeLink
    from fsdp_inspect.store.reader import StoredRun
    from fsdp_inspect.trace.run import RunSource

_ResultT = TypeVar("_ResultT")

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run folder, its URL, or a folder that contains exactly one run.",
    ),
]

BandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        help="Bus bandwidth of the network, for example 50GB/s. Default: that of the run.",
        metavar="RATE",
    ),
]
LatencyOption = Annotated[
    str | None,
    typer.Option(
        "--latency",
        help="Latency of the network, for example 20us. Default: that of the run.",
        metavar="TIME",
    ),
]

NodeBandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--node-bandwidth",
        help="Bus bandwidth within a node, for example 350GB/s.",
        metavar="RATE",
        hidden=True,
    ),
]
NodeLatencyOption = Annotated[
    str | None,
    typer.Option(
        "--node-latency",
        help="Latency within a node, for example 30us.",
        metavar="TIME",
        hidden=True,
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def open_run_argument(run: str, tasks: "Tasks | None" = None, attempt: int | None = None) -> "Run":
    """Open the run that RUN names.

    Args:
        run: The argument.
        tasks: Computes the summary of a run that has not ended, by rank.
        attempt: The start of the job; None: the last one.

    Raises:
        NotARunError: There is no run, or more than one.
        StoreError: The run cannot be read.
    """
    from fsdp_inspect.run import Run

    return Run(open_stored_argument(run, tasks, attempt))


def open_stored_argument(
    run: str, tasks: "Tasks | None" = None, attempt: int | None = None
) -> "StoredRun":
    """Open the run that RUN names, for commands that need its files.

    Args:
        run: The argument.
        tasks: Computes the summary of a run that has not ended, by rank.
        attempt: The start of the job; None: the last one.

    Raises:
        NotARunError: There is no run, or more than one; the message names those nearby.
        StoreError: The run cannot be read.
    """
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.store.folder import find_named, list_runs
    from fsdp_inspect.store.reader import open_run

    try:
        return open_run(run, attempt=attempt, tasks=tasks)
    except NotARunError:
        found = list_runs(run)
        if not found and not Path(run).exists() and "://" not in run:
            found = find_named(list_runs(Path(run).parent), Path(run).name)
            if len(found) > 1:
                paths = ", ".join(str(entry.path) for entry in found)
                raise NotARunError(
                    f"Run {run!r} is ambiguous: {len(found)} runs have this name. Expected the "
                    f"folder of one run. Choose one of: {paths}"
                ) from None
        if len(found) != 1:
            raise
        return open_run(found[0].path, attempt=attempt, tasks=tasks)


def require_new_file(option: str, path: Path | None) -> None:
    """Check that a new file can be written, before any work.

    Raises:
        typer.BadParameter: The path exists, or its folder is not writable.
    """
    if path is None:
        return
    if path.exists():
        raise typer.BadParameter(
            f"{path} already exists. Expected a new file. Choose another name.", param_hint=option
        )
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is not a folder" if not folder.is_dir() else "is not writable"
        raise typer.BadParameter(
            f"{path} cannot be written: {folder} {what}. Choose a file in a writable folder.",
            param_hint=option,
        )


def parse_bandwidth(text: str | None) -> float | None:
    """Bytes per second from the value of `BandwidthOption`; None: the option is not set.

    Raises:
        typer.BadParameter: The value is not a bandwidth.
    """
    from fsdp_inspect.quantities import parse_bytes_per_s

    return _parse("--bandwidth", text, parse_bytes_per_s, "50GB/s")


def parse_node_link(bandwidth: str | None, latency: str | None) -> "NodeLink | None":
    """The link from the values of the options for the link within a node; None: no option is set.

    Raises:
        typer.BadParameter: A value is not a bandwidth or not a time.
    """
    from fsdp_inspect.quantities import parse_bytes_per_s
    from fsdp_inspect.simulation.network import NodeLink

    if bandwidth is None and latency is None:
        return None
    rate = _parse("--node-bandwidth", bandwidth, parse_bytes_per_s, "350GB/s")
    if rate == 0:
        raise typer.BadParameter(
            f"invalid bandwidth {bandwidth!r}. Expected a value above 0, such as 350GB/s.",
            param_hint="--node-bandwidth",
        )
    return NodeLink(rate, parse_time("--node-latency", latency, "30us"))


def parse_latency(text: str | None) -> float | None:
    """Nanoseconds from the value of `LatencyOption`; None: the option is not set.

    Raises:
        typer.BadParameter: The value is not a time.
    """
    return parse_time("--latency", text, "20us")


def parse_time(option: str, text: str | None, example: str) -> float | None:
    """Nanoseconds from the value of an option; None: the option is not set.

    Raises:
        typer.BadParameter: The value is not a time.
    """
    from fsdp_inspect.quantities import parse_time_ns

    return _parse(option, text, parse_time_ns, example)


def _parse(
    option: str, text: str | None, parse: Callable[[str], float | None], example: str
) -> float | None:
    if text is None:
        return None
    value = parse(text)
    if value is None:
        raise typer.BadParameter(
            f"invalid quantity {shorten(text)!r}. Expected a number with a unit, such as "
            f"{example}.",
            param_hint=option,
        )
    return value


AllocatorOption = Annotated[
    str,
    typer.Option(
        "--allocator",
        help="Settings of CUDA's caching allocator, as in PYTORCH_ALLOC_CONF. Default: torch's.",
        metavar="TEXT",
    ),
]


def parse_allocator(text: str) -> "AllocatorSettings":
    """Parse `--allocator`.

    Raises:
        typer.BadParameter: The text is invalid.
    """
    from fsdp_inspect.emulation.allocator.settings import InvalidSettingsError, parse_settings

    try:
        return parse_settings(text)
    except InvalidSettingsError as error:
        raise typer.BadParameter(str(error), param_hint="--allocator") from error


def parse_memory(text: str) -> int:
    """Parse an amount of memory, for `typer.Option(parser=...)`: `80GiB`, `500 MB`.

    Raises:
        typer.BadParameter: The text is not an amount above 0 with a unit.
    """
    from fsdp_inspect.quantities import parse_bytes

    amount = parse_bytes(text, needs_unit=True)
    if not amount:
        is_bare = parse_bytes(text)
        reason = "has no unit" if is_bare else "is not an amount of memory above 0"
        raise typer.BadParameter(
            f"{shorten(text)!r} {reason}. Expected a number with a unit, such as "
            f"{f'{text.strip()}GiB' if is_bare and len(text) < 8 else '80GiB'}."
        )
    return amount


def whole_number(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a parser of whole numbers, for `typer.Option(parser=...)`.

    Args:
        low: The lowest allowed number.
        high: The highest allowed number. The default exceeds all useful values.
    """

    def parse(text: str) -> int:
        # A longer number is out of range. Python does not parse 5,000 digits.
        digits = str(text).strip()
        number = int(digits) if digits.lstrip("-").isdecimal() and len(digits) < 20 else None
        if number is None or not low <= number <= high:
            most = "" if high == 2**31 - 1 else f" to {high}"
            raise typer.BadParameter(
                f"{shorten(str(text))!r} is not a valid number. Expected a whole number from "
                f"{low}{most}."
            )
        return number

    parse.__name__ = "INTEGER"
    return parse


def say_how_to_verify(prediction: Path) -> None:
    """Print how to verify a written prediction, on stderr."""
    command = f"fsdp-inspect verify {shlex.quote(str(prediction))} NEW_RUN"
    print(
        f"Wrote the prediction {prediction}. After running the plan, verify it: {command}",
        file=sys.stderr,
    )


def print_renderable(renderable: "RenderableType") -> None:
    """Print to stdout, in colour on a terminal, with visible control characters."""
    from rich.console import Console

    from fsdp_inspect.report.layout import Harmless

    Console(highlight=False).print(Harmless(renderable), crop=False)


def show_result(
    result: _ResultT,
    render: "Callable[[_ResultT], RenderableType]",
    *,
    as_json: bool,
    run: "RunSource | None" = None,
) -> None:
    """Print a result as JSON, with the run that it belongs to, or as `render` shows it."""
    if not as_json:
        print_renderable(render(result))
        return
    from fsdp_inspect.report.json import render_json, render_run_json

    print(render_json(result) if run is None else render_run_json(run, result))


# --- Add the options that every subcommand has.


def _shared(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of an error, for a bug report.")
    ] = False,
) -> None:
    """The shared options; `cli.main` reads `--traceback` itself."""


def add_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the shared options as its last parameters."""
    own, shared = inspect.signature(command), inspect.signature(_shared)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name in own.parameters})

    parameters = [*own.parameters.values(), *shared.parameters.values()]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **_shared.__annotations__}
    return run
