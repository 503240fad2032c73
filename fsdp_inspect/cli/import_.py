"""`fsdp-inspect import`: convert traces, memory snapshots or flight recorder dumps to a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, parse_memory, show_result
from fsdp_inspect.cli.cluster import DaskOption, open_tasks

if TYPE_CHECKING:
    from fsdp_inspect.importing.flight_recorder import ImportedDumps
    from fsdp_inspect.importing.kineto import ImportedTraces, OnProgress
    from fsdp_inspect.importing.snapshot import ImportedSnapshot
    from fsdp_inspect.importing.trace_file import ImportLimits


def import_(  # noqa: PLR0913 - one argument an option
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A torch.profiler trace (.json, .json.gz), an export of Nsight Systems (.sqlite), "
            "the JSON of rocprofv3, a structured log of torchtitan (.jsonl), a CUDA memory "
            "snapshot, a flight recorder dump (pickle or JSON), or a folder with one file per "
            "rank.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run folder to create.")],
    by_step: Annotated[
        bool | None,
        typer.Option(
            "--by-step/--whole-trace",
            help="One step for each ProfilerStep mark, or the whole trace as one step. Default: "
            "the marks, if the trace has any.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the run; default the name of PATH.")] = "",
    max_size: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_memory,
            help="Largest uncompressed size of a trace, or largest memory for reading a snapshot. "
            "Default: 64GiB, and at most 200 times the size of a compressed file.",
        ),
    ] = None,
    dask: DaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import profiler traces, CUDA memory snapshots or flight recorder dumps as a run.

    Traces are those of torch.profiler (CUDA, ROCm, CPU), exports of Nsight Systems, JSON of
    rocprofv3, and structured logs of torchtitan. Units come from the ranges of FSDP. Flight
    recorder dumps (NCCL, gloo) are for `fsdp-inspect diagnose`. Notes list the data that a file
    does not contain. Memory is bounded, and a failed import leaves no partial run.

    With `--dask`, workers read several traces at once, and each needs the memory of one trace. The
    run has the same bytes. The workers must share the folders of PATH and RUN.

    Example: `fsdp-inspect import traces/ --out runs/imported`

    Example: `fsdp-inspect import traces/ --out runs/imported --dask local`
    """
    _check_path(path)
    from fsdp_inspect.report.outcomes import render_import
    from fsdp_inspect.store.reader import open_run

    imported = _import(path, out, by_step, name, max_size, dask)
    show_result(imported, render_import, as_json=as_json, run=open_run(out))


def _import(
    path: Path,
    out: Path,
    by_step: bool | None,
    name: str,
    max_size: int | None,
    dask: str | None,
) -> "ImportedTraces | ImportedSnapshot | ImportedDumps":
    """Import a path by its kind."""
    from fsdp_inspect.importing.flight_recorder import import_dumps, looks_like_dumps
    from fsdp_inspect.importing.kineto import import_traces
    from fsdp_inspect.importing.snapshot import import_snapshot, looks_like_snapshot
    from fsdp_inspect.importing.snapshot_pickle import MAX_MEMORY_BYTES

    is_dump = looks_like_dumps(path)
    is_snapshot = not is_dump and looks_like_snapshot(path)
    if dask is not None and (is_dump or is_snapshot):
        raise typer.BadParameter(
            "a memory snapshot or flight recorder dump is read by one process. Omit --dask.",
            param_hint="--dask",
        )
    if is_dump:
        return import_dumps(path, out, name=name)
    if is_snapshot:
        if by_step:
            raise typer.BadParameter(
                "a memory snapshot has no ProfilerStep marks. Omit --by-step.",
                param_hint="--by-step",
            )
        return import_snapshot(path, out, name=name, max_memory_bytes=max_size or MAX_MEMORY_BYTES)
    with open_tasks(dask) as tasks, _progress() as on_progress:
        return import_traces(
            path,
            out,
            by_step=by_step,
            name=name,
            limits=_choose_limits(max_size),
            on_progress=on_progress,
            tasks=tasks,
        )


def _check_path(path: Path) -> None:
    """Reject pipes, devices and sockets, because reading them may never end."""
    if not path.exists():
        raise typer.BadParameter(
            f"path {str(path)!r} not found. Expected a file or a folder.", param_hint="PATH"
        )
    if not path.is_file() and not path.is_dir():
        raise typer.BadParameter(
            f"{str(path)!r} is a pipe, a device or a socket. Expected a file or a folder. Write "
            "its content to a file first.",
            param_hint="PATH",
        )


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    """Show a progress bar on stderr if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, share: float) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=1.0)
            bar.update(tasks[name], completed=share)

        yield show


def _choose_limits(max_bytes: int | None) -> "ImportLimits":
    from fsdp_inspect.importing.trace_file import ImportLimits

    if max_bytes is None:
        return ImportLimits()
    return ImportLimits(max_bytes=max_bytes, max_ratio=max_bytes)
