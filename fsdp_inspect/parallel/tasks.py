"""Map a function over items: in this process, or in threads for work that waits for requests.

`dask_tasks` does the same on a cluster. There, a function and its items must be picklable: a
function of a module, and items of plain data with absolute paths.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from fsdp_inspect.errors import ClusterError

T = TypeVar("T")
R = TypeVar("R")

OnDone = Callable[[int, int], object]
"""Called with the number of finished tasks, and the number of all tasks."""


class Tasks(Protocol):
    """A way to run independent tasks."""

    def map(
        self, function: Callable[[T], R], items: Sequence[T], what: str, on_done: OnDone
    ) -> Iterator[R]:
        """The results, in the order of the items.

        Args:
            function: May run more than once for an item, so it must be repeatable.
            items: One for each task. `str(item)` names a task in messages.
            what: The items in the plural, for messages: `traces`.
            on_done: Called when tasks have finished.

        Raises:
            Exception: The exception of the first task, in the order of the items, that failed.
            ClusterError: The cluster failed; the message names what is missing.
        """
        ...


class InProcess:
    """One task after the other in this process, each when its result is requested."""

    def map(
        self, function: Callable[[T], R], items: Sequence[T], what: str, on_done: OnDone
    ) -> Iterator[R]:
        """The results in the order of the items; see `Tasks.map`."""
        on_done(0, len(items))
        for number, item in enumerate(items, 1):
            result = function(item)
            on_done(number, len(items))
            yield result
            del result  # the caller may free it before the next task


class InThreads:
    """Several tasks at once in threads of this process."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def map(
        self, function: Callable[[T], R], items: Sequence[T], what: str, on_done: OnDone
    ) -> Iterator[R]:
        """The results in the order of the items; see `Tasks.map`."""
        on_done(0, len(items))
        pool = ThreadPoolExecutor(self._num_threads)
        try:
            waiting: list[Future[R]] = [pool.submit(function, item) for item in items]
            for number in range(len(waiting)):
                result = waiting[number].result()
                on_done(number + 1, len(items))
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


def require_shared_folder(folder: Path) -> None:
    """Check in a task that its worker sees a folder of the command.

    Raises:
        ClusterError: This machine has no such folder.
    """
    if not folder.is_dir():
        raise ClusterError(
            f"Folder {str(folder)!r} not found on host {socket.gethostname()!r}. Expected a folder "
            "that all workers of the cluster share. Use a shared file system, or for commands that "
            "only read, upload the runs to an object store and name their URL."
        )
