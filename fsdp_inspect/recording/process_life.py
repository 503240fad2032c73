"""Note when a process starts, shards its model, and loads and saves checkpoints.

[Note: Noting loads]
Weights are loaded before the recorder attaches. `note_process` therefore wraps torch's loading
functions once a process, when the recorder is imported (the launcher: when the script imports
torch). A call costs 0.12 ms more before the first step, because it reads the memory of the process,
and 0.6 µs after it. The wraps stay, as those of `sharding_calls`. Saving functions are wrapped only
while a recorder is attached. A script that imported such a function by name before
keeps the original, and its calls are not noted.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.sharding.attributes import set_attribute
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase
from fsdp_inspect.trace.process_life import HostMemoryMark, ProcessLife, TimeSpan

_MOST_SPANS = 100
_CHECKPOINT = "torch.distributed.checkpoint"
_LOADS = {
    "torch": ("load",),
    "torch.serialization": ("load",),
    _CHECKPOINT: ("load", "load_state_dict"),
    f"{_CHECKPOINT}.state_dict_loader": ("load", "load_state_dict"),
    f"{_CHECKPOINT}.state_dict": (
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "set_state_dict",
    ),
}
"""By module: the functions that load a checkpoint, under every name that pickle may look up."""
_SAVES = {"torch": ("save",), _CHECKPOINT: ("save", "save_state_dict", "async_save")}
_ALSO_IN = {"torch": "torch.serialization", _CHECKPOINT: f"{_CHECKPOINT}.state_dict_saver"}
"""The module that defines these functions; pickle looks them up there."""


class _ProcessNotes:
    """What is noted of this process."""

    imported_ns: int | None = None
    shard: tuple[int, int] | None = None
    shard_mark: HostMemoryMark | None = None
    """The memory at the end of the last `fully_shard` call."""
    is_loading = False
    is_training = False
    """Whether steps are recorded, with samples of the memory."""

    def __init__(self) -> None:
        self.loads: deque[tuple[int, int]] = deque(maxlen=_MOST_SPANS)
        self.marks: deque[HostMemoryMark] = deque(maxlen=_MOST_SPANS)

    def mark_memory(self, time_ns: int) -> None:
        """Read the memory of the process for a moment that has just passed, before training."""
        mark = None if self.is_training else _read_memory(time_ns)
        if mark is not None:
            self.marks.append(mark)


_notes = _ProcessNotes()


def note_process() -> None:
    """Note the end of the imports, and calls that load checkpoints from now on; once a process."""
    if _notes.imported_ns is not None:
        return
    _notes.imported_ns = time.perf_counter_ns()
    _notes.mark_memory(_notes.imported_ns)
    for module in _LOADS:
        call_after_import(module, functools.partial(_wrap_loads, module))


def begin_sharding() -> None:
    """Note the start of a `fully_shard` call."""
    now = time.perf_counter_ns()
    if _notes.shard is None:
        _notes.shard = (now, now)
        _notes.mark_memory(now)


def end_sharding() -> None:
    """Note the end of a `fully_shard` call."""
    if _notes.shard is not None:
        _notes.shard = (_notes.shard[0], time.perf_counter_ns())
        _notes.shard_mark = _read_memory(_notes.shard[1])


def describe_process(
    first_step_ns: int | None = None, background_saves: Iterable[tuple[int, int]] = ()
) -> ProcessLife:
    """Describe what is known of this process.

    Args:
        first_step_ns: Only loads that began before it count; None means all so far.
        background_saves: Checkpoints that were written in the background, as (start, end) in ns.
    """
    if first_step_ns is None:
        _notes.mark_memory(time.perf_counter_ns())
    marks = [*_notes.marks, *([_notes.shard_mark] if _notes.shard_mark else [])]
    _notes.is_training = first_step_ns is not None
    return ProcessLife(
        started_ns=_process_started_ns(),
        imported_ns=_notes.imported_ns,
        shard=None if _notes.shard is None else _span(_notes.shard),
        loads=[
            _span(each)
            for each in list(_notes.loads)
            if first_step_ns is None or each[0] < first_step_ns
        ],
        background_saves=[_span(each) for each in tuple(background_saves)],
        memory_marks=sorted(marks, key=lambda mark: mark.time_ns),
    )


def _span(times: tuple[int, int]) -> TimeSpan:
    return TimeSpan(start_ns=times[0], end_ns=times[1])


def _wrap_loads(module: str) -> None:
    for name in _LOADS[module]:
        original = getattr(sys.modules[module], name, None)
        if original is not None:
            set_attribute(sys.modules[module], name, _shared_wrap(original))


def _shared_wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """The wrap of a function: the same one under all of its names."""
    if getattr(original, "notes_loads", False):
        return original
    known = _wraps.get(original)
    if known is None:
        known = _wraps[original] = _note_load(original)
    return known


_wraps: dict[Callable[..., Any], Callable[..., Any]] = {}


def _note_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        if _notes.is_loading or threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        _notes.is_loading, start = True, time.perf_counter_ns()
        _notes.mark_memory(start)
        try:
            return original(*args, **kwargs)
        finally:
            _notes.is_loading, end = False, time.perf_counter_ns()
            _notes.loads.append((start, end))
            _notes.mark_memory(end)

    load.notes_loads = True  # type: ignore[attr-defined]
    return load


class CheckpointHooks:
    """Times the calls of torch that save a checkpoint on the training thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_saving = False
        self._is_attached = False
        self.background_saves: deque[tuple[int, int]] = deque(maxlen=_MOST_SPANS)
        """Saves that `async_save` completed, as (start, end) in ns."""
        self.has_news = False
        """Whether `background_saves` has grown since the last look."""

    def attach(self, patches: Patches) -> None:
        """Wrap the saving functions of all modules that are imported now or later."""
        self._is_attached = True
        patches.on_undo(self._forget)
        for module in _SAVES:
            call_after_import(module, functools.partial(self._wrap, module, patches))

    def _forget(self) -> None:
        self._is_attached = False

    def _wrap(self, module: str, patches: Patches) -> None:
        for name in _SAVES[module] if self._is_attached else ():
            original = getattr(sys.modules[module], name, None)
            if original is None:
                continue
            wrap = self._timed(original)
            for each in (sys.modules[module], sys.modules.get(_ALSO_IN[module])):
                if getattr(each, name, None) is original:
                    patches.set_attribute(each, name, wrap)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._is_saving or not self._is_between_passes():
                return original(*args, **kwargs)
            self._is_saving, outer = True, session.phase
            session.phase = Phase.EVALUATION
            start, start_ns = session.clock.mark(), session.clock.host_now()
            try:
                saved = original(*args, **kwargs)
            finally:
                self._is_saving, session.phase = False, outer
            try:
                self._note(start, start_ns, saved)
            except Exception as error:
                session.fail(error)
            return saved

        return save

    def _is_between_passes(self) -> bool:
        session = self._session
        return (
            session.active
            and threading.get_ident() == session.training_thread
            and not session.in_backward
            and not session.open_units
        )

    def _note(self, start: Any, start_ns: int, saved: Any) -> None:
        """Add the row of a save that returned; a write in the background is noted at its end."""
        session, flags = self._session, int(EventFlag.CHECKPOINT)
        written = getattr(saved, "upload_completion", saved)
        if isinstance(written, Future):
            flags |= EventFlag.ASYNC
            written.add_done_callback(functools.partial(self._note_written, start_ns))
        session.add(
            EventKind.BETWEEN_STEPS,
            start,
            session.clock.mark(),
            phase=Phase.EVALUATION,
            flags=flags,
        )

    def _note_written(self, start_ns: int, written: Future[Any]) -> None:
        if not written.cancelled() and written.exception() is None:
            self.background_saves.append((start_ns, self._session.clock.host_now()))
            self.has_news = True


def _process_started_ns() -> int | None:
    """The start of this process on the clock of the events; None where the system hides it."""
    try:
        if sys.platform == "linux":
            stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf(
                "SC_CLK_TCK"
            )
        else:
            import psutil

            age_s = time.time() - psutil.Process().create_time()
    except (ImportError, OSError, ValueError, IndexError):
        return None
    started_ns = time.perf_counter_ns() - round(age_s * 1e9)
    return started_ns if age_s >= 0 and started_ns >= 0 else None


def _read_memory(time_ns: int) -> HostMemoryMark | None:
    """The resident memory of this process; None where the system has no such file (proc(5))."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
        high_water, rss = (int(values[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return HostMemoryMark(time_ns=time_ns, rss_bytes=rss, high_water_bytes=high_water)
