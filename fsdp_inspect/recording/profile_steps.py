"""Run torch's profiler in the chosen steps, and write its trace into the rank's folder.

The profiled steps are never timed. The trace is written before the last of them ends, so that no
timed step contains the work of the profiler. An error of the profiler ends the window only.
"""

from __future__ import annotations

import gzip
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.torch_api.autograd import is_profiler_enabled
from fsdp_inspect.store.schema import PROFILE_FILE

if TYPE_CHECKING:
    from fsdp_inspect.recording.session import Session

_FAST = 1
"""The level of gzip: a third larger than the default, and five times as fast."""
_OTHER_PROFILERS = (
    (torch.profiler.profile, "prepare_trace"),
    (torch.autograd.profiler.profile, "__enter__"),
)
"""What starts a profiler of the script. torch runs one profiler at a time, so ours then ends."""


class ProfileSteps:
    """Profiles the chosen steps; steps in a row are one window. Only the last window is kept."""

    def __init__(
        self, session: Session, steps: Sequence[int], device: torch.device, folder: Path
    ) -> None:
        self._session = session
        self._steps = frozenset(steps)
        self._device = device
        self._folder = folder
        self._profiler: Any = None
        self._mark: Any = None
        self._patches = Patches()
        self._first = 0
        self._spent_ns = 0
        """Time that the profiler itself took to start, to stop and to write."""

    def add(self, first: int, last: int) -> None:
        """Profile these later steps, too; the watchdog calls it seconds before the first."""
        self._steps |= frozenset(range(first, last + 1))

    def begin(self) -> None:
        """Profile the step that begins now, if it is one of the chosen steps."""
        session = self._session
        if session.step not in self._steps:
            return
        if session.tracker is not None or (self._profiler is None and is_profiler_enabled()):
            reason = "another profiler runs" if session.tracker is None else "it is a memory step"
            session.problem(f"Step {session.step} is not profiled: {reason}.")
            return
        session.is_memory_step = True
        self._try("start", self._begin)

    def end(self) -> None:
        """End the profiled step: after the last one of a window, write its trace."""
        session = self._session
        if self._profiler is not None:
            is_last = session.step + 1 not in self._steps
            self._try("stop", lambda: self._end(writes=is_last))
        if session.tracker is None and session.step in self._steps:
            session.is_memory_step = False

    def abandon(self) -> None:
        """Stop profiling; nothing is written."""
        if self._profiler is not None:
            self._try("stop", self._stop)

    def _begin(self) -> None:
        begun_ns = time.perf_counter_ns()
        if self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            profiler.start()
            self._profiler, self._first = profiler, self._session.step
            for owner, name in _OTHER_PROFILERS:
                self._patches.set_attribute(owner, name, self._yielding(getattr(owner, name)))
        self._mark = torch.profiler.record_function(f"ProfilerStep#{self._session.step}")
        self._mark.__enter__()
        self._spent_ns += time.perf_counter_ns() - begun_ns

    def _yielding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The start of another profiler, before which this window ends."""

        def start(*arguments: Any, **keywords: Any) -> Any:
            if self._profiler is not None:
                self._try("stop", self._stop)
                self._session.problem(
                    f"The profile of step {self._first} is missing: the script started a profiler."
                )
            return original(*arguments, **keywords)

        return start

    def _end(self, *, writes: bool) -> None:
        self._leave()
        if not writes:
            return
        begun_ns = time.perf_counter_ns()
        profiler = self._profiler
        self._stop()
        target = self._folder / PROFILE_FILE
        plain, packed = target.with_name("profile.tmp-json"), target.with_name("profile.tmp-gz")
        try:
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", _FAST) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            packed.replace(target)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        self._spent_ns += time.perf_counter_ns() - begun_ns
        last = self._session.step
        steps = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
        self._session.problem(
            f"The profile of {steps} has {format_bytes(target.stat().st_size)}. Starting and "
            f"writing it took {format_ns(self._spent_ns)}, outside of all timed steps."
        )
        self._spent_ns = 0

    def _leave(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _stop(self) -> None:
        self._patches.undo()
        self._leave()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _try(self, what: str, action: Callable[[], None]) -> None:
        """Run an action; an error ends the window."""
        try:
            action()
        except Exception as error:
            raise_if_of_signal(error)
            self._patches.undo()
            self._profiler = self._mark = None
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self._session.problem(
                f"Step {self._session.step} has no profile: the profiler did not {what} ({reason})."
            )
