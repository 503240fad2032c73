"""`fsdp-inspect import`: somebody else's recording as a run, to be read by every other command."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable

if TYPE_CHECKING:
    from fsdp_inspect.importing.kineto import ImportedTraces, OnProgress
    from fsdp_inspect.importing.snapshot import ImportedSnapshot
    from fsdp_inspect.importing.trace_file import ImportLimits


def import_(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A torch.profiler trace (.json, .json.gz), a CUDA memory snapshot, or a folder "
            "with one of them for each rank.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="Folder of the run to make.")],
    by_step: Annotated[
        bool,
        typer.Option(
            "--by-step", help="One step for each ProfilerStep mark; else the trace is one step."
        ),
    ] = False,
    name: Annotated[
        str, typer.Option(help="How the run is called; default the name of PATH.")
    ] = "",
    max_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Read files that hold up to this, however tightly packed; default 64GiB, and 200 "
            "times the size of a packed file. Of a snapshot: what its values may take in memory.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import traces of torch.profiler (CUDA, ROCm, CPU) or CUDA memory snapshots as a run.

    Units come from FSDP's own ranges where the trace has them; what it cannot tell is said. Large
    traces are read in little memory, and nothing is left behind when an import fails.

    Example: `fsdp-inspect import traces/ --out runs/imported`
    """
    _check_path(path)
    max_bytes = None if max_size is None else _parse_size(max_size)
    if _is_snapshot(path):
        if by_step:
            raise typer.BadParameter(
                "a memory snapshot has no ProfilerStep marks; leave it out", param_hint="--by-step"
            )
        _import_snapshot(path, out, name, max_bytes, as_json=as_json)
        return
    from fsdp_inspect.importing.kineto import import_traces
    from fsdp_inspect.report.importing import render_import

    with _progress() as on_progress:
        imported = import_traces(
            path,
            out,
            by_step=by_step,
            name=name,
            limits=_choose_limits(max_bytes),
            on_progress=on_progress,
        )
    if as_json:
        _print_json(out, imported)
    else:
        print_renderable(render_import(imported))


def _print_json(out: Path, imported: "ImportedTraces | ImportedSnapshot") -> None:
    from fsdp_inspect.report.json import render_run_json
    from fsdp_inspect.store.reader import open_run

    print(render_run_json(open_run(out), imported))


def _check_path(path: Path) -> None:
    """Whatever is neither a file nor a folder (a pipe, a device, a socket) may never end."""
    if not path.exists():
        raise typer.BadParameter(f"there is nothing at {str(path)!r}", param_hint="PATH")
    if not path.is_file() and not path.is_dir():
        raise typer.BadParameter(
            f"{str(path)!r} is neither a file nor a folder, but a pipe, a device or a socket. "
            "Write what it holds into a file first",
            param_hint="PATH",
        )


def _is_snapshot(path: Path) -> bool:
    from fsdp_inspect.importing.snapshot import looks_like_snapshot

    return looks_like_snapshot(path)


def _import_snapshot(
    path: Path, out: Path, name: str, max_bytes: int | None, *, as_json: bool
) -> None:
    from fsdp_inspect.importing.snapshot import import_snapshot
    from fsdp_inspect.importing.snapshot_pickle import MAX_MEMORY_BYTES
    from fsdp_inspect.report.importing import render_snapshot

    imported = import_snapshot(path, out, name=name, max_memory_bytes=max_bytes or MAX_MEMORY_BYTES)
    if as_json:
        _print_json(out, imported)
    else:
        print_renderable(render_snapshot(imported))


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    """A bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bar:
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


def _parse_size(text: str) -> int:
    """`64GiB`, `500 MB`, `1000000`: bytes."""
    from fsdp_inspect.quantities import parse_bytes

    size = parse_bytes(text)
    if not size:
        raise typer.BadParameter(
            f"{text!r} is no size; expected bytes such as 64GiB or 500MiB", param_hint="--max-size"
        )
    return size
