"""The option `--dask`, and progress bars of commands that run many tasks."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from fsdp_inspect.parallel.tasks import OnDone, Tasks


T = TypeVar("T")
R = TypeVar("R")

DaskOption = Annotated[
    str | None,
    typer.Option(
        "--dask",
        help="Run on a Dask cluster: `local` (a worker for each core), `local:2`, or the address "
        "of a scheduler, such as tcp://host:8786. Needs fsdp-inspect[dask].",
        metavar="ADDRESS",
    ),
]


@contextmanager
def open_tasks(dask: str | None) -> "Iterator[Tasks | None]":
    """The tasks on the cluster of `--dask`; None without the option."""
    if dask is None:
        yield None
        return
    from fsdp_inspect.parallel.dask_tasks import connect_dask

    with connect_dask(dask) as tasks:
        yield tasks


def require_cluster(dask: str | None) -> None:
    """Check the cluster of `--dask` before long work that needs it later.

    Raises:
        ClusterError: The cluster cannot be used.
    """
    if dask is not None:
        from fsdp_inspect.parallel.dask_tasks import require_dask

        require_dask(dask)


def show_bars(tasks: "Tasks | None") -> "Tasks | None":
    """The same tasks, with a progress bar on a terminal for each group of tasks."""
    return None if tasks is None else _ShownTasks(tasks)


class _ShownTasks:
    """Tasks with a progress bar; implements `Tasks`."""

    def __init__(self, tasks: "Tasks") -> None:
        self._tasks = tasks

    def map(
        self, function: Callable[[T], R], items: Sequence[T], what: str, on_done: "OnDone"
    ) -> Iterator[R]:
        """The results in the order of the items; see `Tasks.map`."""
        with show_count(f"Dask: {what}") as show:

            def report(done: int, total: int) -> None:
                show(done, total)
                on_done(done, total)

            yield from self._tasks.map(function, items, what, report)


class _Downloaded:
    """A text with the number of downloaded bytes at the moment when it is drawn."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich__(self) -> str:
        from fsdp_inspect.formatting import format_bytes
        from fsdp_inspect.store.remote_system import DOWNLOADS

        return f"{self._text} ({format_bytes(DOWNLOADS.num_bytes)} downloaded)"


@contextmanager
def show_count(text: str, place: str | None = None) -> Iterator[Callable[[int, int], object]]:
    """A progress bar on a terminal; call the result with the finished and all tasks.

    Args:
        text: The name of the work.
        place: If it is a URL, the bar is there from the start, and shows the downloaded bytes.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        RenderableColumn,
        TimeRemainingColumn,
    )

    from fsdp_inspect.store.files import is_url

    console = Console(stderr=True)
    if not console.is_terminal:  # a bar would print an empty line
        yield lambda done, total: None
        return
    is_remote = place is not None and is_url(place)
    label = _Downloaded(text) if is_remote else text
    bar = Progress(
        RenderableColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, visible=is_remote)

        def show(done: int, total: int) -> None:
            is_shown = is_remote or total > 0
            bar.update(task, completed=done, total=total or None, visible=is_shown)

        yield show


# --- Show the number of simulated plans on a terminal during a long search.

_QUIET_S = 0.5
"""A shorter search shows no progress."""


@contextmanager
def show_progress() -> Iterator[Callable[[int], object]]:
    """Show progress; call the result with the number of plans simulated so far."""
    from rich.console import Console

    console = Console(stderr=True)
    begun = time.monotonic()
    with console.status("Simulating plans ...") as status:
        status.stop()

        def on_progress(count: int) -> None:
            if time.monotonic() - begun > _QUIET_S:
                status.start()
                status.update(f"Simulating plans ... {count}")

        yield on_progress if console.is_terminal else lambda _: None
