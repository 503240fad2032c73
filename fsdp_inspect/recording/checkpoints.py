"""Time the calls of torch that save a checkpoint, while a recorder is attached.

A script that imported such a function by name before keeps the original, and its calls are not
timed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.process_life import CHECKPOINT_PACKAGE, MOST_SPANS
from fsdp_inspect.recording.session import Session
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase

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
        self._is_attached = False
        self.background_saves: deque[tuple[int, int]] = deque(maxlen=MOST_SPANS)
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
