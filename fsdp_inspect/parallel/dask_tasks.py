"""Run tasks on a dask.distributed cluster: worker processes of this machine, or a scheduler.

[Note: Failures of a cluster] A task is a function that may run again. The scheduler repeats the
tasks of a worker that was killed or ran out of memory on other workers, up to three times. If a
task kills a worker each time, all workers are gone for minutes, or the scheduler itself is gone,
`map` raises a `ClusterError` that names the missing tasks. A task that nobody waits for any more
may still run on its worker. Tasks therefore write only into folders that the command removes, or
files that are replaced as a whole.
"""

import contextlib
import logging
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import ClusterError
from fsdp_inspect.formatting import listed
from fsdp_inspect.parallel.tasks import OnDone
from fsdp_inspect.version import __version__

T = TypeVar("T")
R = TypeVar("R")

LOCAL = "local"
NO_WORKERS_S = 300.0
"""The time after which a cluster without workers is given up."""
_CONNECT_S = 10
_LOOK_EVERY_S = 0.2
_MAX_NAMED = 5
_SENT_VARIABLES = ("FSDP_INSPECT_MAX_MEMORY",)
"""Environment variables of this process that tasks see, too."""
_SETTINGS = {
    "distributed.comm.timeouts.connect": f"{_CONNECT_S}s",
    "distributed.worker.memory.target": False,  # results are small, so spilling frees nothing
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,  # all workers could wait for each other
    # Dask lets local workers return all freed memory at once. A third of an import's time went to
    # the page faults that this causes, and the import returns its large arrays itself.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None,
    "distributed.admin.log-format": "%(message)s",
}


class DaskTasks:
    """Tasks on a cluster; implements `Tasks`."""

    def __init__(self, client: Any, address: str, *, no_workers_s: float = NO_WORKERS_S) -> None:
        self._client = client
        self._address = address
        self._no_workers_s = no_workers_s

    def map(
        self, function: Callable[[T], R], items: Sequence[T], what: str, on_done: OnDone
    ) -> Iterator[R]:
        """The results in the order of the items; see `Tasks.map`."""
        if not items:
            return
        sent = {name: os.environ[name] for name in _SENT_VARIABLES if name in os.environ}
        on_done(0, len(items))
        futures = self._client.map(
            run_task, [(function, item, sent) for item in items], pure=False, key=what
        )
        try:
            for number in range(len(futures)):
                self._wait(futures, number, items, what, on_done)
                result = self._result(futures, number, items, what)
                futures[number] = None  # the cluster may free the result
                yield result
        finally:
            self._cancel([future for future in futures if future is not None])

    def _wait(
        self, futures: list[Any], number: int, items: Sequence[Any], what: str, on_done: OnDone
    ) -> None:
        """Wait for a future, and report the progress of all."""
        workers_seen = time.monotonic()
        while True:
            num_done = sum(future is None or future.done() for future in futures)
            on_done(num_done, len(futures))
            if futures[number].done():
                return
            if self._has_workers():
                workers_seen = time.monotonic()
            elif time.monotonic() - workers_seen > self._no_workers_s:
                raise ClusterError(
                    f"The Dask cluster {self._address} has no workers for "
                    f"{self._no_workers_s:g} s. {_missing(futures, items, what)} Expected a "
                    "running worker. Start workers, and run the command again."
                )
            self._wait_a_moment(futures[number])

    @staticmethod
    def _wait_a_moment(future: Any) -> None:
        from distributed import wait

        try:
            wait([future], timeout=_LOOK_EVERY_S)
        except TimeoutError:
            return
        except Exception:  # the future is lost: its result shows the reason
            time.sleep(_LOOK_EVERY_S)

    def _has_workers(self) -> bool:
        with contextlib.suppress(Exception):  # the connection may be lost: `done` shows it
            return bool(self._client.scheduler_info(n_workers=-1)["workers"])
        return True

    def _result(self, futures: list[Any], number: int, items: Sequence[Any], what: str) -> Any:
        from distributed import KilledWorker

        try:
            result, failure = futures[number].result()
        except KilledWorker as error:
            raise ClusterError(
                f"Dask workers were killed, or ran out of memory, each time that "
                f"{_name(items[number])} was assigned to them; they may have run another one of "
                f"the {what}. {_missing(futures, items, what)} Expected workers with enough memory "
                "for one of them. Start workers with a higher memory limit, or fewer on a machine."
            ) from error
        except (CancelledError, TimeoutError, OSError) as error:
            raise ClusterError(
                f"The Dask scheduler {self._address} is gone. {_missing(futures, items, what)} "
                "Expected a scheduler that runs until the end. Start the cluster, and run the "
                "command again."
            ) from error
        except Exception as error:  # the worker cannot run the task, or its result is lost
            raise ClusterError(
                f"A Dask worker failed at {_name(items[number])}: {type(error).__name__}: "
                f"{shorten(str(error))}. {_missing(futures, items, what)} Expected workers with "
                "the same versions of Python and of all packages. Install them alike."
            ) from error
        if failure is not None:
            raise failure
        return result

    def _cancel(self, futures: list[Any]) -> None:
        with contextlib.suppress(Exception):
            self._client.cancel(futures, force=True)


def run_task(
    task: tuple[Callable[[T], R], T, dict[str, str]],
) -> tuple[R | None, Exception | None]:
    """Run one task in a worker, with the environment variables of the command.

    Returns:
        The result and None, or None and the exception of the function. An exception that cannot be
        sent is replaced.
    """
    function, item, variables = task
    os.environ.update(variables)
    try:
        return function(item), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            text = shorten(f"{type(error).__name__}: {error}")
            return None, ClusterError(
                f"Internal error of a Dask worker at {_name(item)}: {text}. Expected a result. Run "
                "the command without --dask to see the whole error."
            )
        return None, error.with_traceback(None)


@contextlib.contextmanager
def connect_dask(address: str) -> Iterator[DaskTasks]:
    """Connect to a cluster, or start one on this machine.

    Args:
        address: `local` for one worker on each core, `local:2` for two workers, or the address of
            a scheduler: `tcp://host:8786`, `tls://host:8786`.

    Raises:
        ClusterError: Dask is not installed, the scheduler does not answer, or its workers have
            another version of FSDP Inspect.
    """
    dask = _import_dask()
    _silence_logs()
    with dask.config.set(_SETTINGS):
        if _is_local(address):
            with _local_client(_num_workers(address)) as client:
                yield DaskTasks(client, address)
        else:
            with _client_of(address) as client:
                _check_workers(client, address)
                yield DaskTasks(client, address)


def require_dask(address: str) -> None:
    """Check that a cluster can be used, without starting workers.

    Raises:
        ClusterError: `connect_dask` would fail.
    """
    if _is_local(address):
        _import_dask()
        _num_workers(address)
    else:
        with connect_dask(address):
            pass


def _import_dask() -> Any:
    try:
        import dask
        import distributed  # noqa: F401
    except ModuleNotFoundError as error:
        raise ClusterError(
            "Dask is not installed. Expected the package dask.distributed for --dask. Install it "
            "with: pip install 'fsdp-inspect[dask]'"
        ) from error
    return dask


def _is_local(address: str) -> bool:
    return address.partition(":")[0] == LOCAL


def _silence_logs() -> None:
    """Silence the log of Dask, because our errors state what failed."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("distributed", "tornado", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _num_workers(address: str) -> int:
    _, _, text = address.partition(":")
    if not text and address == LOCAL:
        return len(os.sched_getaffinity(0))
    if text.isdecimal() and 0 < int(text) <= 1024:
        return int(text)
    raise ClusterError(
        f"Invalid --dask {shorten(address)!r}. Expected `local`, `local:2` for two workers, or the "
        "address of a scheduler such as tcp://host:8786."
    )


@contextlib.contextmanager
def _local_client(num_workers: int) -> Iterator[Any]:
    """A cluster of processes of this machine, which ends with the block."""
    from distributed import Client, LocalCluster

    scratch = tempfile.mkdtemp(prefix="fsdp-inspect-dask-")
    try:
        with (
            LocalCluster(
                n_workers=num_workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address=None,
                silence_logs=logging.CRITICAL,
                local_directory=scratch,
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _client_of(address: str) -> Iterator[Any]:
    from distributed import Client

    if "://" not in address:
        raise ClusterError(
            f"Invalid --dask {shorten(address)!r}. Expected `local`, `local:2` for two workers, or "
            "the address of a scheduler such as tcp://host:8786."
        )
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"The Dask scheduler {shorten(address)!r} does not answer: "
            f"{shorten(str(error).splitlines()[0].rstrip('. '))}. Expected a running scheduler. "
            "Start it with `dask scheduler`, and check its address."
        ) from error
    try:
        yield client
    finally:
        with contextlib.suppress(Exception):
            client.close(timeout=_CONNECT_S)


def worker_version() -> str:
    """The version of FSDP Inspect in a worker."""
    return __version__


def _check_workers(client: Any, address: str) -> None:
    """Reject workers without this version of FSDP Inspect, whose results could differ."""
    found = client.run(worker_version, on_error="return")
    for worker, version in found.items():
        if isinstance(version, OSError):
            continue  # it has just died, and Dask gives its tasks to others
        if version != __version__:
            has = f"has version {version}" if isinstance(version, str) else "has none"
            raise ClusterError(
                f"The worker {worker} of {address} {has} of FSDP Inspect. Expected version "
                f"{__version__} on all workers. Install it in their environment: "
                f"pip install 'fsdp-inspect[dask]=={__version__}'"
            )


def _missing(futures: Sequence[Any], items: Sequence[Any], what: str) -> str:
    """State which tasks have no result."""
    left = [
        item
        for future, item in zip(futures, items, strict=True)
        if future is not None and future.status != "finished"
    ]
    names = listed([_name(item) for item in left], _MAX_NAMED)
    return f"{len(left):,} of {len(items):,} {what} are missing: {names}."


def _name(item: Any) -> str:
    return shorten(str(item))
