"""Start the ranks of a training without importing torch again for each of them.

A rank is forked from a server that has imported torch and our recorder, which takes 0.1 s instead
of the 4 s of a fresh interpreter. Each rank runs its script as `__main__` and finds the environment
variables that `torchrun` sets. Tests of `torchrun` itself use the fixture `torchrun`.
"""

import atexit
import itertools
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "fsdp_inspect.recording.recorder",
    "instrumented_trainer.trainer",
)
_GRACE_S = 10
"""How long the other ranks may run on after one has failed."""
_LAUNCHES = itertools.count()


def run_ranks(
    arguments: tuple[str, ...],
    *,
    num_ranks: int,
    timeout_s: float,
    cwd: Path,
    logs: Path,
    environment: Mapping[str, str],
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run `python ARGUMENTS` on each rank to its end: a script, or `-m` and a module.

    Returns:
        The ranks as one process, whose output is that of all ranks together and whose exit code is
        that of the first rank that failed; and whether all of them ended in time.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        **environment,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"forked-{os.getpid()}-{next(_LAUNCHES)}",
    }
    outputs = (logs / "stdout", logs / "stderr")
    for output in outputs:
        output.touch()
    ranks = []
    for rank in range(num_ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=_run, args=(arguments, own, cwd, *outputs)))
        ranks[-1].start()
    ended = _wait(ranks, timeout_s)
    code = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
    done = subprocess.CompletedProcess(
        list(arguments), code or 0, outputs[0].read_text(), outputs[1].read_text()
    )
    return done, ended


def _wait(ranks: list[ForkServerProcess], timeout_s: float) -> bool:
    """Wait until all ranks ended; kill those that are left, and the others of a failed one."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.exitcode for rank in ranks):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            next(rank for rank in ranks if rank.exitcode is None).join(0.05)
        return all(rank.exitcode is not None for rank in ranks) or any(
            rank.exitcode for rank in ranks
        )
    finally:
        for rank in ranks:
            if rank.exitcode is None:
                rank.kill()
            rank.join()


def _run(
    arguments: tuple[str, ...], environment: dict[str, str], cwd: Path, stdout: Path, stderr: Path
) -> None:
    """Be a rank, in the forked process."""
    for stream, path in ((1, stdout), (2, stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    code = 1
    try:
        _run_as_main(arguments)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as the interpreter
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_as_main(arguments: tuple[str, ...]) -> None:
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
