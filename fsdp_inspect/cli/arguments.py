"""Which arguments do several subcommands share, and what do they stand for?"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fsdp_inspect.run import Run
    from fsdp_inspect.simulation.network import NodeLink
    from fsdp_inspect.store.reader import StoredRun

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run, its URL, or a folder that holds exactly one run.",
    ),
]

BandwidthOption = Annotated[
    str | None,
    typer.Option("--bandwidth", help="Bus bandwidth of another network: 50GB/s.", metavar="RATE"),
]
LatencyOption = Annotated[
    str | None,
    typer.Option("--latency", help="Latency of another network: 20us.", metavar="TIME"),
]

NodeBandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--node-bandwidth",
        help="Bus bandwidth within a node, where reshard_after_forward=N gathers: 350GB/s.",
        metavar="RATE",
    ),
]
NodeLatencyOption = Annotated[
    str | None,
    typer.Option("--node-latency", help="Latency within a node: 30us.", metavar="TIME"),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def open_run_argument(run: str) -> "Run":
    """Open what a user gave as RUN.

    Raises:
        NotARunError: There is no run, or more than one; the message names those nearby.
        StoreError: The run cannot be read.
    """
    from fsdp_inspect.run import Run

    return Run(open_stored_argument(run))


def open_stored_argument(run: str) -> "StoredRun":
    """As `open_run_argument`, for commands that need the files of the run.

    Raises:
        NotARunError: There is no run, or more than one; the message names those nearby.
        StoreError: The run cannot be read.
    """
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    try:
        return open_run(run)
    except NotARunError:
        inside = list_runs(Path(run)) if "://" not in run else []
        if len(inside) != 1:
            raise
        return open_run(inside[0].path)


def require_new_file(option: str, path: Path | None) -> None:
    """Refuse to write over a file, or where nothing can be written, before anything else is done.

    Raises:
        typer.BadParameter: There is something at that place, or no folder to write to.
    """
    if path is None:
        return
    if path.exists():
        raise typer.BadParameter(f"{path} exists. Name a new file.", param_hint=option)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is no folder" if not folder.is_dir() else "may not be written to"
        raise typer.BadParameter(
            f"{path} cannot be written: {folder} {what}. Name a file in a folder of yours.",
            param_hint=option,
        )


def parse_bandwidth(text: str | None) -> float | None:
    """Bytes a second that `BandwidthOption` was given; None: nothing.

    Raises:
        typer.BadParameter: It is no bandwidth.
    """
    from fsdp_inspect.quantities import parse_bytes_per_s

    return _parse("--bandwidth", text, parse_bytes_per_s, "50GB/s")


def parse_node_link(bandwidth: str | None, latency: str | None) -> "NodeLink | None":
    """The link that `NodeBandwidthOption` and `NodeLatencyOption` were given; None: neither.

    Raises:
        typer.BadParameter: One is no bandwidth, or no time.
    """
    from fsdp_inspect.quantities import parse_bytes_per_s
    from fsdp_inspect.simulation.network import NodeLink

    if bandwidth is None and latency is None:
        return None
    rate = _parse("--node-bandwidth", bandwidth, parse_bytes_per_s, "350GB/s")
    if rate == 0:
        raise typer.BadParameter(
            f"{bandwidth!r} is no bandwidth. Expected one above 0, like 350GB/s.",
            param_hint="--node-bandwidth",
        )
    return NodeLink(rate, parse_time("--node-latency", latency, "30us"))


def parse_latency(text: str | None) -> float | None:
    """Nanoseconds that `LatencyOption` was given; None: nothing.

    Raises:
        typer.BadParameter: It is no time.
    """
    return parse_time("--latency", text, "20us")


def parse_time(option: str, text: str | None, example: str) -> float | None:
    """Nanoseconds that an option was given; None: nothing.

    Raises:
        typer.BadParameter: It is no time.
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
            f"{text!r} is no such quantity. Expected a number with a unit, like {example}.",
            param_hint=option,
        )
    return value


def say_how_to_verify(prediction: Path) -> None:
    """What to do with a prediction that was written; on stderr, that output stays what it is."""
    command = f"fsdp-inspect verify {shlex.quote(str(prediction))} NEW_RUN"
    print(f"Predicted in {prediction}. Once the plan ran: {command}", file=sys.stderr)


def print_renderable(renderable: "RenderableType") -> None:
    """Print to stdout, in colour where it is a terminal; names from a run command nothing."""
    from rich.console import Console

    from fsdp_inspect.report.layout import Harmless

    Console(highlight=False, soft_wrap=False).print(Harmless(renderable))
