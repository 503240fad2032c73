"""Choose the run folder of a job: rank 0 decides, and the other ranks use its choice.

Rank 0 publishes the folder's name in the process group's key-value store. The training gets no
extra collective, and any backend works. Each rank records into the folder of that name next to its
own configured path. A node that does not share rank 0's file system, or that has another path,
therefore keeps its part on its own disk, with a copy of the manifest.

Rank 0 may have no sharded model, for example if it only serves the other ranks. A rank therefore
uses the choice of the lowest rank of its process groups, for which the training waits, too. If that
is the rank itself, it waits for rank 0 for a short time, and then decides.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import linecache
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection
from datetime import UTC, datetime
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from fsdp_inspect.errors import StoreError
from fsdp_inspect.recording.code_places import package_of
from fsdp_inspect.recording.environment import find_script_commit, mask_secrets
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.recording.torch_api.process_groups import default_store
from fsdp_inspect.store import folder
from fsdp_inspect.store.schema import CRASH_FILE, MANIFEST_FILE, SIGTERM_FILE, STACKS_FILE
from fsdp_inspect.trace.run import JobLaunch, RunManifest, RunStatus

_recordings = itertools.count()
_RANK_0_S = 10.0
"""The longest wait for a rank 0 for which the training itself does not wait."""
_RANK_0_POLL_S = 0.05
_MAX_SUFFIX = 1000
_MAX_EARLIER = 100
"""The number of runs among which a restarted job looks for its earlier start."""
_UNIQUE = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{4}")
"""The names of `default_path`."""


class RecordingFolder(NamedTuple):
    """The folder and attempt into which this rank records."""

    path: Path
    attempt: int
    key: str = ""
    """Prefix of this recording's keys in the process group's store."""
    created_unix_ns: int = 0
    """The time at which rank 0 created the run; 0: unknown."""

    @property
    def remote_name(self) -> str:
        """The run's name in an object store, where the names of all nodes and jobs must differ.

        A folder that the user named gets the time of its creation. Another node has no earlier
        attempt on its disk, and would upload into those of the first node.
        """
        if _UNIQUE.fullmatch(self.path.name) or not self.created_unix_ns:
            return self.path.name
        created = datetime.fromtimestamp(self.created_unix_ns / 1e9, UTC)
        return f"{self.path.name}-{created:%Y%m%d-%H%M%S}"


def default_path(name: str, directory: Path = Path("runs")) -> Path:
    """Return `<directory>/<UTC time>-<name>-<random>`: unique, and sorted by time in a listing."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.") or "run"
    return directory / f"{stamp}-{safe}-{uuid4().hex[:4]}"


def agree_on_folder(
    path: Path,
    manifest: RunManifest,
    rank: int,
    *,
    peers: Collection[int] = (),
    resume: bool = False,
) -> RecordingFolder:
    """Create the run on the first rank and share its name and attempt with every rank.

    Args:
        path: The configured run folder of this rank; only rank 0's last component counts.
        manifest: Written if the folder has none.
        rank: This rank.
        peers: The ranks that share a process group of the model with this one; default: all.
        resume: Continue any run of the same job in the folder.

    Raises:
        OSError: Rank 0 cannot create the folder; the other ranks continue with its name.
    """
    key = f"fsdp_inspect/{this_launch().num_restarts}/recording/{next(_recordings)}"
    alone = manifest.world_size == 1 or manifest.source == "emulated"
    leader = rank if alone else min(peers, default=0)
    if leader == rank != 0 and not alone and _comes(f"{key}/0"):
        leader = 0
    chosen = RecordingFolder(path, 0, created_unix_ns=manifest.created_unix_ns)
    try:
        if rank == leader:
            chosen = _create(path, manifest, resume=resume)
        else:
            chosen = _follow(leader, f"{key}/{leader}", path, manifest)
    finally:
        if not alone:
            _publish(f"{key}/{rank}", chosen)
    return chosen._replace(key=key)


def _publish(key: str, chosen: RecordingFolder) -> None:
    message = {
        "name": chosen.path.name,
        "attempt": chosen.attempt,
        "created_unix_ns": chosen.created_unix_ns,
    }
    default_store().set(key, json.dumps(message))


def _comes(key: str) -> bool:
    """Whether rank 0 publishes its folder soon."""
    deadline = time.monotonic() + _RANK_0_S
    while not default_store().check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_RANK_0_POLL_S)
    return True


def this_launch() -> JobLaunch:
    """The start of this process; a job without an elastic agent has no id."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if not restarts.isdecimal():
        return JobLaunch()
    with contextlib.suppress(Exception):  # no psutil, or the launcher has ended
        import psutil

        agent = psutil.Process(os.getppid())
        launcher = f"{socket.gethostname()}/{agent.pid}/{agent.create_time():.2f}"
        return JobLaunch(id=launcher, num_restarts=int(restarts))
    return JobLaunch(num_restarts=int(restarts))


def _follow(leader: int, key: str, path: Path, manifest: RunManifest) -> RecordingFolder:
    try:
        answer = json.loads(default_store().get(key))
    except RuntimeError as error:  # DistStoreError: a timeout, or the rank has exited
        warn(f"rank {leader} sent no run folder ({error}). This rank records into {str(path)!r}.")
        return RecordingFolder(path, 0)
    chosen = path.with_name(answer["name"])
    with contextlib.suppress(OSError):  # the writer gets the same error and reports it
        if not (chosen / MANIFEST_FILE).exists():  # it does not share this disk
            known = {"run_id": chosen.name, "git_commit": find_script_commit()}
            if answer.get("created_unix_ns"):
                known["created_unix_ns"] = answer["created_unix_ns"]
            folder.write_manifest_if_absent(chosen, manifest.model_copy(update=known))
    created_unix_ns = answer.get("created_unix_ns", 0)
    return RecordingFolder(chosen, answer["attempt"], created_unix_ns=created_unix_ns)


def _create(path: Path, manifest: RunManifest, *, resume: bool) -> RecordingFolder:
    """Create the run folder, under a new name if it holds a run that this job does not continue."""
    launch = this_launch()
    path = _earlier_start(path, launch) or path

    def check(candidate: Path, there: RunManifest) -> None:
        if not resume:
            refusal = _refusal(candidate, there, manifest, launch)
            if refusal:
                raise StoreError(
                    f"{str(candidate)!r} contains {refusal}. Expected a run that this job "
                    "continues; Recorder(resume=True) continues it."
                )

    for number in range(1, _MAX_SUFFIX):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        named = manifest.model_copy(update={"run_id": candidate.name})
        try:
            attempt = folder.create_run(candidate, named, partial(check, candidate))
        except StoreError as error:
            if number == 1:
                warn(f"{error} Recording into a new folder next to it.")
            continue
        created_unix_ns = manifest.created_unix_ns
        with contextlib.suppress(StoreError):  # the folder may have the manifest of an earlier job
            created_unix_ns = folder.read_manifest(candidate).created_unix_ns
        return RecordingFolder(candidate, attempt, created_unix_ns=created_unix_ns)
    raise OSError(f"no free folder name next to {path}")


def _refusal(path: Path, there: RunManifest, new: RunManifest, launch: JobLaunch) -> str:
    """The reason why a job does not continue the run in a folder; empty: it does.

    It continues its own earlier starts by the same launcher. It also continues a run that ended
    without completing, if it has the same command and plan.
    """
    status, last = folder.last_attempt(path)
    if launch.id and launch.id == last.id and launch.num_restarts > last.num_restarts:
        return ""
    if status is RunStatus.RUNNING:
        return "a run that still records"
    if status is RunStatus.COMPLETE:
        return f"a complete run, started at {there.created}"
    differences = [
        name
        for name, one, two in (
            ("command", there.command, new.command),
            ("configuration", there.config, new.config),
            ("plan", _plan_of(there), _plan_of(new)),
        )
        if one != two
    ]
    return f"a run with another {' and '.join(differences)}" if differences else ""


def _plan_of(manifest: RunManifest) -> list[dict[str, Any]]:
    """What is known of the plan before the first forward."""
    fields = {"fqn", "param_dtype", "reduce_dtype", "offload", "shard_group", "replicate_group"}
    return [unit.model_dump(include=fields) for unit in manifest.units]


def _earlier_start(path: Path, launch: JobLaunch) -> Path | None:
    """The run that an earlier start of this launch recorded under a name with its own time."""
    if not launch.num_restarts or not launch.id or not _UNIQUE.fullmatch(path.name):
        return None
    names = sorted(each.name for each in path.parent.glob("*") if _UNIQUE.fullmatch(each.name))
    for name in reversed(names[-_MAX_EARLIER:]):
        with contextlib.suppress(StoreError, OSError):
            if folder.last_attempt(path.with_name(name))[1].id == launch.id:
                return path.with_name(name)
    return None


# --- Write the Python stacks of all threads of this rank into its folder.
#
# `stacks.txt` holds the stacks that the watchdog requested. `crash.txt` holds the stacks of a fatal
# signal (a segmentation fault, an abort). `sigterm.txt` holds the stacks of SIGTERM, which
# launchers send to the remaining ranks after one rank has died. Python's `faulthandler` writes the
# last two from the signal handler, and the signal then has its usual effect. A handler is installed
# only if the process has none. The script may replace it later.
#
# [Note: Crashes that go to stderr] Many loops enable `faulthandler` for stderr before they train:
# torch's `@record` does so, and so do `PYTHONFAULTHANDLER=1` and Python's development mode. A
# process has only one such handler, so a crash would leave no stacks in the run. In these cases the
# handler writes to `crash.txt`, and the keeper of the black box copies the file to stderr after the
# crash.

_RECORDS_ERRORS = "torch.distributed.elastic.multiprocessing.errors"
"""The module of `@record`, whose wrapper calls the script's function."""


class StackFiles:
    """The stack files of this rank."""

    def __init__(self, folder: Path, *, with_source: bool) -> None:
        """`with_source`: whether the user's lines on the training thread's stack are written."""
        self._folder = folder
        self._with_source = with_source
        self._crash: TextIOWrapper | None = None
        self._sigterm: TextIOWrapper | None = None
        self._is_of_stderr = False
        """Whether `faulthandler` wrote to stderr before `install`."""
        self._pid = os.getpid()

    @property
    def catches_crashes(self) -> bool:
        """Whether a fatal signal writes stacks into the rank's folder."""
        return self._crash is not None

    @property
    def path_to_copy(self) -> Path | None:
        """The file that is also printed on stderr after a crash; None: none."""
        return self._folder / CRASH_FILE if self._is_of_stderr else None

    def install(self, *, has_keeper: bool) -> None:
        """Catch the stacks of fatal signals and of SIGTERM, unless another handler does.

        Args:
            has_keeper: Whether a process outlives this one and can copy `path_to_copy`.
        """
        with contextlib.suppress(OSError, ValueError, AttributeError):
            is_of_stderr = faulthandler.is_enabled() and has_keeper and _writes_to_stderr()
            if is_of_stderr or not faulthandler.is_enabled():
                self._crash = self._open(CRASH_FILE)
                faulthandler.enable(self._crash)
                self._is_of_stderr = is_of_stderr
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._sigterm = self._open(SIGTERM_FILE)
                faulthandler.register(signal.SIGTERM, self._sigterm, all_threads=True, chain=True)
            if self._crash is not None or self._sigterm is not None:
                os.register_at_fork(after_in_child=self.uninstall)

    def uninstall(self) -> None:
        """Undo `install`, and delete empty files; also in forked children."""
        crash, self._crash = self._crash, None
        sigterm, self._sigterm = self._sigterm, None
        if crash is not None:
            faulthandler.disable()
            if self._is_of_stderr:
                self._is_of_stderr = False
                with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
                    faulthandler.enable()
        if sigterm is not None:
            faulthandler.unregister(signal.SIGTERM)
        for file in (crash, sigterm):
            if file is not None and os.getpid() == self._pid:
                _close(file)

    def write_now(self, training_thread: int, clock_ns: int) -> None:
        """Write the stacks of all threads.

        Args:
            training_thread: The training thread, which is written first.
            clock_ns: The rank's clock now.

        Raises:
            OSError: The file cannot be written.
        """
        names = {f"{thread.ident or 0:#018x}": thread.name for thread in threading.enumerate()}
        head = {
            "unix_ns": time.time_ns(),
            "clock_ns": clock_ns,
            "training_thread": f"{training_thread:#018x}",
            "threads": names,
            "statements": _read_statements(training_thread) if self._with_source else {},
        }
        with self._open(STACKS_FILE) as file:
            file.write(json.dumps(head) + "\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _open(self, name: str) -> TextIOWrapper:
        return (self._folder / name).open("w")


def _writes_to_stderr() -> bool:
    """Whether the caller that enabled `faulthandler` is known to have chosen stderr."""
    if sys.flags.dev_mode or "faulthandler" in sys._xoptions:
        return True
    if os.environ.get("PYTHONFAULTHANDLER"):
        return True
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == _RECORDS_ERRORS:
            return True
        frame = frame.f_back
    return False


def _read_statements(thread: int) -> dict[str, str]:
    """The lines of the user's source on a thread's stack, by `file:line`."""
    frame = sys._current_frames().get(thread)
    found = {}
    while frame is not None:
        if package_of(frame) == "":
            file, line = frame.f_code.co_filename, frame.f_lineno
            found[f"{file}:{line}"] = mask_secrets(linecache.getline(file, line).strip())[:200]
        frame = frame.f_back
    return found


def _close(file: TextIOWrapper) -> None:
    with contextlib.suppress(OSError):
        is_empty = os.fstat(file.fileno()).st_size == 0
        file.close()
        if is_empty:
            Path(file.name).unlink()
