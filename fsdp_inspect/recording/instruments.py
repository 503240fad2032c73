"""Install and remove all hooks of a recording together."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from fsdp_inspect.recording.code_places import find_calling_line
from fsdp_inspect.recording.dist_calls import DistCalls
from fsdp_inspect.recording.graph_collectives import GraphCollectives
from fsdp_inspect.recording.host_stops import StopCounter
from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.recording.loop_hooks import LoopHooks
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.process_life import CHECKPOINT_PACKAGE, MOST_SPANS
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.base import Sharder
from fsdp_inspect.recording.torch_api.autograd import (
    COMPILER,
    keep_from_compiler,
    uses_compile,
)
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase, Source, Stream
from fsdp_inspect.trace.host_work import COLLECT_CALL, COLLECTION, GRAPH_CAPTURE

if TYPE_CHECKING:
    from fsdp_inspect.recording.session import Session


class Instruments:
    """The hooks on a model's units, on the training loop and on `torch.distributed`."""

    def __init__(
        self,
        session: Session,
        sharder: Sharder[Any],
        memory: MemoryProbe,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        on_optimizer_step: Callable[[torch.optim.Optimizer], None],
        before_update: Callable[[], None] | None = None,
    ) -> None:
        self._session = session
        session.unit_depths = [_depth(handle.fqns[0]) for handle in sharder.units]
        session.unit_of = {
            id(module): index
            for index, handle in enumerate(sharder.units)
            for module in handle.owned_modules
        }
        self._patches = Patches()
        self._units = sharder.make_hooks(session, memory)
        units = sharder.graph_units(self._units)
        self._dist_calls = DistCalls(
            session, self._units.reductions_of, sees_functional=units is None
        )
        self._graphs = GraphCollectives(session, units)
        self._is_in_graphs = units is not None
        self.checkpoints = CheckpointHooks(session)
        self._collections = GarbageCollections(session)
        session.stops = self.stops = StopCounter(session)
        outer = sharder.outer_optimizers()
        self._loop = LoopHooks(
            session, optimizers, on_optimizer_step, before_update, outer, sharder.units
        )

    def attach(self) -> None:
        """Install all hooks."""
        keep_out = functools.partial(keep_from_compiler, __package__)
        self._patches.on_undo(call_after_import(COMPILER, keep_out))
        self._units.attach(self._patches)
        self._dist_calls.attach(self._patches)
        if self._is_in_graphs or uses_compile():
            self._graphs.attach(self._patches)
        self._loop.attach(self._patches)
        self.checkpoints.attach(self._patches)
        self._collections.attach(self._patches)
        sees_calls = not (self._is_in_graphs or uses_compile())
        is_run = self._session.source is not Source.PREDICTED  # a forecast reads no values
        self.stops.attach(self._patches, wraps=sees_calls and is_run)
        checks = self._session.checks
        if checks is not None and sees_calls:
            checks.attach(self._patches)
        pause_during_capture(self._session, self._patches)

    def choose_detail(self, is_detailed: bool) -> None:
        """Begin a detailed or a plain step; see `Session.choose_detail`."""
        self._session.choose_detail(is_detailed)
        self._units.choose_detail(is_detailed)
        self.stops.choose_detail(is_detailed=is_detailed)

    def end_step(self) -> None:
        """Close open events after a step, and reinstall hooks that other code replaced."""
        self._units.end_step()
        self._dist_calls.end_step()
        self._collections.end_step()
        self._graphs.end_step()
        if not self._graphs.is_attached and uses_compile():
            self._graphs.attach(self._patches)

    def abandon(self) -> None:
        """Remove all hooks without writing anything, after an error while they were installed."""
        self._patches.undo()
        if self._session.black_box is not None:
            self._session.black_box.release()

    def detach(self) -> None:
        """Remove all hooks and write their pending events."""
        self._units.close()
        self._dist_calls.close()
        self._patches.undo()
        self._session.process_groups.forget()
        if self._session.black_box is not None:
            self._session.black_box.release()


def _depth(fqn: str) -> int:
    return fqn.count(".") + 1 if fqn else 0


# --- Time the calls of torch that save a checkpoint, while a recorder is attached.
#
# A script that imported such a function by name before keeps the original, and its calls are not
# timed.

_SAVES = {"torch": ("save",), CHECKPOINT_PACKAGE: ("save", "save_state_dict", "async_save")}
_ALSO_IN = {
    "torch": "torch.serialization",
    CHECKPOINT_PACKAGE: f"{CHECKPOINT_PACKAGE}.state_dict_saver",
}
"""The module that defines these functions; pickle looks them up there."""


class CheckpointHooks:
    """Times the calls of torch that save a checkpoint on the training thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_saving = False
        self.background_saves: deque[tuple[int, int]] = deque(maxlen=MOST_SPANS)
        """Saves that `async_save` completed, as (start, end) in ns."""
        self.has_news = False
        """Whether `background_saves` has grown since the last look."""

    def attach(self, patches: Patches) -> None:
        """Wrap the saving functions of all modules that are imported now or later."""
        for module in _SAVES:
            withdraw = call_after_import(module, functools.partial(self._wrap, module, patches))
            patches.on_undo(withdraw)

    def _wrap(self, module: str, patches: Patches) -> None:
        for name in _SAVES[module]:
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


# --- Time Python's garbage collections, which stop the training thread from any thread.
#
# Python collects in the thread that allocates, and holds its lock meanwhile. A callback in
# `gc.callbacks` notes the start and the end of each collection; it takes no lock, because it may
# interrupt any other code of the recorder. Collections shorter than `LEAST_NS` are not recorded. A
# collection of all generations is also noted in the black box while it runs: the watchdog of a rank
# that collects for long cannot run.

LEAST_NS = 100_000
"""The shortest recorded collection. Collections of young objects take less time."""
_MOST = 10_000
"""The highest number of collections of one step."""
_OLDEST_GENERATION = 2


class GarbageCollections:
    """The callback and the collections that are not written yet."""

    def __init__(self, session: Session) -> None:
        """Prepare the callback; `session` is the recording."""
        self._session = session
        self._now = session.clock.host_now
        self._pid = os.getpid()
        self._started_ns = 0
        self._is_called = False
        """Whether the script calls `gc.collect()` now."""
        self._found: deque[tuple[int, int, int, int, int]] = deque(maxlen=_MOST)
        """Start, end, step, phase and flags of each collection."""

    def attach(self, patches: Patches) -> None:
        """Note collections from now on."""
        gc.callbacks.append(self._called)
        patches.on_undo(self._detach)
        patches.set_attribute(gc, "collect", self._wrap_collect(gc.collect))

    def _wrap_collect(self, original: Callable[..., int]) -> Callable[..., int]:
        """Note the collections for which the script asks: `gc.disable()` does not prevent them."""

        @functools.wraps(original)
        def collect(*args: Any, **kwargs: Any) -> int:
            self._is_called = True
            try:
                return original(*args, **kwargs)
            finally:
                self._is_called = False

        return collect

    def _detach(self) -> None:
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, moment: str, info: dict[str, int]) -> None:
        is_full = info["generation"] == _OLDEST_GENERATION
        frame = sys._getframe().f_back  # None at the end of the interpreter
        if moment == "start":
            self._started_ns = self._now()
            if is_full:
                self._note_start(frame)
            return
        start, end = self._started_ns, self._now()
        if is_full or end - start >= LEAST_NS:
            self._note_end(start, end, frame, is_full=is_full)

    def _note_start(self, frame: FrameType | None) -> None:
        box = self._session.black_box
        if box is not None and os.getpid() == self._pid:
            box.begin_collection(time.time_ns(), find_calling_line(frame))

    def _note_end(self, start: int, end: int, frame: FrameType | None, *, is_full: bool) -> None:
        session = self._session
        if os.getpid() != self._pid:  # a forked child, such as a worker of the data loader
            return
        if is_full and session.black_box is not None:
            session.black_box.end_collection()
        if start and end - start >= LEAST_NS and session.active:
            flags = int(EventFlag.FULL_COLLECTION) if is_full else 0
            self._found.append((start, end, session.step, int(session.phase), flags))
            if session.stops is not None:
                reason = COLLECT_CALL if self._is_called else ""
                session.stops.note_stop(COLLECTION, end - start, frame, reason)

    def end_step(self) -> None:
        """Write the collections that have ended."""
        while self._found:
            start, end, step, phase, flags = self._found.popleft()
            self._session.add(
                EventKind.GARBAGE_COLLECTION,
                start,
                end,
                step=step,
                phase=Phase(phase),
                stream=Stream.HOST,
                flags=flags,
            )


# --- Pause the recording while a CUDA graph is captured.
#
# An event recorded on a capturing stream becomes part of the graph and has no time. A query of any
# event may end the capture with an error. Every hook therefore only calls the original until the
# capture ends, and the run contains a note about it. Replays of the graph run no Python code: their
# steps have a duration but no units.


def pause_during_capture(session: Session, patches: Patches) -> None:
    """Stop recording at each `capture_begin` and resume after its `capture_end`.

    torch 2.13, `torch/cuda/graphs.py`: `torch.cuda.graph` and CUDA graph trees both call these two
    methods of `torch.cuda.CUDAGraph`.
    """
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    started: dict[int, int] = {}

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        started[id(self)] = session.clock.host_now()
        session.pause(
            f"A CUDA graph was captured in step {session.step}. The recorder sees nothing inside a "
            "graph: steps that replay it show only their duration."
        )
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            started.pop(id(self), None)
            session.resume()
            raise

    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            session.resume()
            start_ns, end_ns = started.pop(id(self), 0), session.clock.host_now()
            if start_ns and session.active:
                session.add(EventKind.GRAPH_CAPTURE, start_ns, end_ns, stream=Stream.HOST)
                if session.stops is not None:
                    session.stops.note_stop(GRAPH_CAPTURE, end_ns - start_ns, sys._getframe(1))

    patches.set_attribute(graph, "capture_begin", capture_begin)
    patches.set_attribute(graph, "capture_end", capture_end)
