"""Time Python's garbage collections, which stop the training thread from any thread.

Python collects in the thread that allocates, and holds its lock meanwhile. A callback in
`gc.callbacks` notes the start and the end of each collection; it takes no lock, because it may
interrupt any other code of the recorder. Collections shorter than `LEAST_NS` are not recorded. A
collection of all generations is also noted in the black box while it runs: the watchdog of a rank
that collects for long cannot run.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING

from fsdp_inspect.recording.code_places import package_of
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase, Stream

if TYPE_CHECKING:
    from fsdp_inspect.recording.session import Session

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
        self._found: deque[tuple[int, int, int, int, int]] = deque(maxlen=_MOST)
        """Start, end, step, phase and flags of each collection."""

    def attach(self, patches: Patches) -> None:
        """Note collections from now on."""
        gc.callbacks.append(self._called)
        patches.on_undo(self._detach)

    def _detach(self) -> None:
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, moment: str, info: dict[str, int]) -> None:
        is_full = info["generation"] == _OLDEST_GENERATION
        if moment == "start":
            self._started_ns = self._now()
            if is_full:
                self._note_start(sys._getframe().f_back)  # None at the end of the interpreter
            return
        start, end = self._started_ns, self._now()
        if is_full or end - start >= LEAST_NS:
            self._note_end(start, end, is_full=is_full)

    def _note_start(self, frame: FrameType | None) -> None:
        box = self._session.black_box
        if box is not None and os.getpid() == self._pid:
            box.begin_collection(time.time_ns(), _place_of(frame))

    def _note_end(self, start: int, end: int, *, is_full: bool) -> None:
        session = self._session
        if os.getpid() != self._pid:  # a forked child, such as a worker of the data loader
            return
        if is_full and session.black_box is not None:
            session.black_box.end_collection()
        if start and end - start >= LEAST_NS and session.active:
            flags = int(EventFlag.FULL_COLLECTION) if is_full else 0
            self._found.append((start, end, session.step, int(session.phase), flags))

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


def _place_of(frame: FrameType | None) -> str:
    """The user's line on a stack, `file:line`; empty if there is none."""
    while frame is not None:
        if package_of(frame) == "":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
