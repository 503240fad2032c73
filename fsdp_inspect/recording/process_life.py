"""Record when a process starts, shards its model, loads checkpoints and compiles.

[Note: Noting loads]
Weights are loaded before the recorder attaches. `note_process` therefore wraps torch's loading
functions once in each process, when the recorder is imported (the launcher: when the script imports
torch). A call costs 0.12 ms more before the first step, because it reads the memory of the process,
and 0.6 µs after it. The wraps stay, like those of `sharding_calls`. A script that imported such a
function by name before keeps the original, and its calls are not noted.

[Note: Noting compilations]
torch.compile compiles in the middle of a forward or a backward, perhaps in many steps. torch calls
registered functions at the start and the end of the outermost compilation (torch 2.13,
`torch/_dynamo/callback.py`). Older versions of torch without them note nothing.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.recording.torch_api.attributes import set_attribute
from fsdp_inspect.recording.torch_api.autograd import COMPILE_CALLBACKS
from fsdp_inspect.trace.run import HostMemoryMark, ProcessLife, TimeSpan

MOST_SPANS = 100
"""The highest number of loads, and of saves, that a run stores."""
CHECKPOINT_PACKAGE = "torch.distributed.checkpoint"
_LOADS = {
    "torch": ("load",),
    "torch.serialization": ("load",),
    CHECKPOINT_PACKAGE: ("load", "load_state_dict"),
    f"{CHECKPOINT_PACKAGE}.state_dict_loader": ("load", "load_state_dict"),
    f"{CHECKPOINT_PACKAGE}.state_dict": (
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "set_state_dict",
    ),
}
"""The functions that load a checkpoint, by module, under every name that pickle may look up."""


class _ProcessNotes:
    """The notes of this process."""

    imported_ns: int | None = None
    shard: tuple[int, int] | None = None
    shard_mark: HostMemoryMark | None = None
    """The memory at the end of the last `fully_shard` call."""
    is_loading = False
    is_training = False
    """Whether steps are recorded, with samples of the memory."""

    def __init__(self) -> None:
        self.loads: deque[tuple[int, int]] = deque(maxlen=MOST_SPANS)
        self.compiles: deque[tuple[int, int]] = deque(maxlen=MOST_SPANS)
        self.compile_started_ns = 0
        self.marks: deque[HostMemoryMark] = deque(maxlen=MOST_SPANS)

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
    call_after_import(COMPILE_CALLBACKS, _watch_compiler)


def num_compiles() -> int:
    """The number of compilations that `describe_process` would list."""
    return len(_notes.compiles)


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
    first_step_ns: int | None = None,
    background_saves: Iterable[tuple[int, int]] = (),
    standstills: Iterable[tuple[int, int]] = (),
) -> ProcessLife:
    """Describe this process as far as it is known.

    Args:
        first_step_ns: Only loads that began before it count; None means all loads.
        background_saves: Checkpoints that were written in the background, as (start, end) in ns.
        standstills: Times in which nothing moved.
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
        compiles=[_span(each) for each in tuple(_notes.compiles)],
        standstills=[_span(each) for each in tuple(standstills)],
        memory_marks=sorted(marks, key=lambda mark: mark.time_ns),
    )


def _span(times: tuple[int, int]) -> TimeSpan:
    return TimeSpan(start_ns=times[0], end_ns=times[1])


def _watch_compiler() -> None:
    """Note compilations. See [Note: Noting compilations]."""
    callbacks: Any = sys.modules[COMPILE_CALLBACKS]
    handler = getattr(callbacks, "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        return

    def start(_: object) -> None:
        _notes.compile_started_ns = time.perf_counter_ns()

    def end(_: object) -> None:
        _notes.compiles.append((_notes.compile_started_ns, time.perf_counter_ns()))

    handler.register_start_callback(start)
    handler.register_end_callback(end)


def _wrap_loads(module: str) -> None:
    for name in _LOADS[module]:
        original = getattr(sys.modules[module], name, None)
        if original is not None:
            set_attribute(sys.modules[module], name, _shared_wrap(original))


def _shared_wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """The wrap of a function, which is the same under all of its names."""
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


def _process_started_ns() -> int | None:
    """The start of this process on the clock of the events; None if the system hides it."""
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
    """The resident memory of this process; None if the system has no such file (proc(5))."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
        high_water, rss = (int(values[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return HostMemoryMark(time_ns=time_ns, rss_bytes=rss, high_water_bytes=high_water)
