"""Count the calls that read values of tensors, collect garbage or compile, by line.

On a device such a read waits for all work before it. On a CPU it only takes the time of the call.
Methods of `torch.Tensor` are wrapped in detailed steps, in which each of the first reads costs some
µs more.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import handle_torch_function, has_torch_function

from fsdp_inspect.recording.clocks import Clock
from fsdp_inspect.recording.code_places import OWN_PACKAGES, CodePlaces
from fsdp_inspect.recording.devices import find_cores
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.torch_api.compilations import read_compilations, read_graph_breaks
from fsdp_inspect.recording.torch_api.overrides import unseen
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase, Stream
from fsdp_inspect.trace.host_work import (
    BOOLEAN_MASK,
    COMPILATION,
    MOST_BATCHES,
    MOST_BREAKS,
    MOST_STOPS,
    PAGEABLE_COPY,
    PRINTED,
    BatchWork,
    GraphBreak,
    HostActivity,
    HostStop,
    parse_cores,
)

_READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "numpy": ".numpy()",
    "nonzero": "nonzero()",
    "masked_select": "masked_select()",
    "__bool__": "bool(tensor)",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__repr__": PRINTED,
    "__format__": PRINTED,
}
"""The methods of `torch.Tensor` that need a value on the host, and their names in texts."""
_OF_DEVICE = {"unique": "unique()", "equal": "equal()", "__index__": "int(tensor)"}
"""More of them, which are plain compute on a CPU."""
_WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"))
_EXACT, _ONE_OF = 1000, 64
"""The reads of a step that are all timed. After them, one of 64 stands for the others, because a
loop may read a million values."""
_MOST_USUAL = 5
"""The most that a sampled call takes longer than the shortest one at its line."""
_BUSY, _ENOUGH_BUSY = 5000, 3
"""After this number of steps with so many reads, reads are no longer watched."""
_MOST_MASKS = 3
"""Indices of one call that are looked at."""

_Key = tuple[str, int, int, int]
"""Kind of call, place, phase and unit."""


class Counting(Protocol):
    """What counting calls needs of a `Session`."""

    active: bool
    detail: bool
    wants_detail: bool
    step: int
    phase: Phase
    in_backward: bool
    training_thread: int
    clock: Clock

    def issuing_unit(self) -> int:
        """The innermost unit on the host's stack."""
        ...

    def add(
        self, kind: int, start: Any, end: Any, step: int | None = None, *, stream: int | None = None
    ) -> None:
        """Add one event row."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the recording because of an error of its own."""
        ...


class StopCounter:
    """The calls of a recording, by line, and the sizes of its batches."""

    def __init__(self, session: Counting) -> None:
        self._session = session
        self._places = CodePlaces()
        self._names: dict[int, str] = {}
        self._now: dict[_Key, list[int]] = {}
        """Count, time and shortest call of the step that runs."""
        self._total: dict[_Key, list[int]] = {}
        """Count, time and steps of all counted steps."""
        self._reasons: dict[_Key, str] = {}
        self._num_steps = 0
        self._is_inside = self._sees_reads = False
        self._on_device = not session.clock.immediate
        self._calls = 0
        """Reads in the step that runs."""
        self._clock_ns = 0
        """The time that a timed call takes longer because it is timed."""
        self._reads = Patches()
        self._num_busy = self._num_read_steps = 0
        """Counted steps with many reads, and counted steps in which reads are watched."""
        self._last_compilation: Any = None
        self._pid = os.getpid()
        self._batches: deque[_Batch] = deque(maxlen=MOST_BATCHES)
        self._batch: _Batch | None = None
        self._first_unit: int | None = None
        """The unit that receives the batch of the step that runs."""

    def attach(self, patches: Patches, *, wraps: bool) -> None:
        """Count from now on. Under torch.compile, `wraps` is False: its code has no such calls."""
        _, self._last_compilation = read_compilations(None)
        self._sees_reads = wraps
        if wraps:
            self._clock_ns = _time_nothing()
            patches.on_undo(self._reads.undo)
            self.choose_detail(is_detailed=self._session.wants_detail)

    def choose_detail(self, *, is_detailed: bool) -> None:
        """Wrap the reads in detailed steps only, and only until they are known well enough."""
        self._reads.undo()
        if is_detailed and self._sees_reads and self._num_busy < _ENOUGH_BUSY:
            self._wrap_reads()

    def _wrap_reads(self) -> None:
        reads = self._reads
        for name, what in (_READS | (_OF_DEVICE if self._on_device else {})).items():
            wrap = self._wrap(getattr(torch.Tensor, name), what, self._counts_read)
            reads.set_attribute(torch.Tensor, name, wrap)
        index = self._wrap(torch.Tensor.__getitem__, BOOLEAN_MASK, _has_mask)
        reads.set_attribute(torch.Tensor, "__getitem__", index)
        for owner, name in _WAITS:
            wrap = self._wrap(getattr(owner, name), "synchronize()", self._counts_read)
            reads.set_attribute(owner, name, wrap)
        if self._on_device:
            for name in ("to", "cuda"):
                copy = self._wrap_copy(getattr(torch.Tensor, name))
                reads.set_attribute(torch.Tensor, name, copy)

    def _wrap(
        self, original: Callable[..., Any], what: str, counts: Callable[[Any], bool]
    ) -> Callable[..., Any]:
        """Return a function that calls a method, and times it if its arguments count.

        For a tensor with `__torch_function__`, torch looks up the method by its name and would hand
        over this function. Tables of the user's class hold the original, so that is handed over.
        """
        session, now = self._session, time.perf_counter_ns

        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            call: Callable[..., Any] = original
            if has_torch_function(args):
                call = functools.partial(handle_torch_function, original, args)
            if not session.detail or self._is_inside or not counts(args):
                return call(*args, **kwargs)
            start_ns, self._is_inside = now(), True
            try:
                return call(*args, **kwargs)
            finally:
                self._is_inside = False
                self._note(what, now() - start_ns, sys._getframe(1))

        return read

    def _wrap_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a method, and times copies that stop the host."""
        session, now = self._session, time.perf_counter_ns

        @functools.wraps(original)
        def copy(*args: Any, **kwargs: Any) -> Any:
            call: Callable[..., Any] = original
            if has_torch_function(args):
                call = functools.partial(handle_torch_function, original, args)
            if not session.detail or not session.active or self._is_inside:
                return call(*args, **kwargs)
            start_ns = now()
            result = call(*args, **kwargs)
            self._note_copy(args[0], result, kwargs, now() - start_ns, sys._getframe(1))
            return result

        return copy

    def _note_copy(
        self, source: Any, result: Any, options: Any, duration_ns: int, frame: FrameType
    ) -> None:
        try:
            what = _name_copy(source, result, options)
        except Exception as error:
            self._session.fail(error)
        else:
            if what:
                self._note(what, duration_ns, frame)

    def _counts_read(self, args: Any) -> bool:
        """Whether this read is timed: each of the first ones in a step, later one of many."""
        self._calls += 1
        is_sampled = self._calls <= _EXACT or self._calls % _ONE_OF == 0
        # A tensor on the host has its value already; without arguments, the call waits for all.
        return is_sampled and not (self._on_device and args and _is_on_host(args[0]))

    def _note(self, what: str, duration_ns: int, frame: FrameType) -> None:
        """Count a call of the training thread; the recorder's own calls do not count."""
        session = self._session
        try:
            if threading.get_ident() != session.training_thread:
                return
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] in OWN_PACKAGES[:1]:
                return
            duration_ns = max(duration_ns - self._clock_ns, 0)
            weight = 1 if self._calls <= _EXACT or what == BOOLEAN_MASK else _ONE_OF
            self._add(what, duration_ns, frame, weight)
        except Exception as error:
            session.fail(error)

    def _add(
        self,
        what: str,
        duration_ns: int,
        frame: FrameType | None,
        weight: int = 1,
        reason: str = "",
    ) -> None:
        session = self._session
        place = 0 if frame is None else self._places.find(frame)
        key = (what, place, int(session.phase), session.issuing_unit())
        counts = self._now.get(key)
        if counts is None:
            if len(self._now) >= MOST_STOPS:
                return
            counts = self._now[key] = [0, 0, duration_ns]
        if reason:
            self._reasons[key] = reason
        counts[0] += weight
        counts[2] = min(counts[2], duration_ns)
        # A sampled call that lost its core must not stand for 64 calls.
        usual_ns = duration_ns if weight == 1 else min(duration_ns, _MOST_USUAL * counts[2])
        counts[1] += weight * usual_ns

    def note_stop(
        self, what: str, duration_ns: int, frame: FrameType | None, reason: str = ""
    ) -> None:
        """Count a garbage collection or a graph capture that has ended, on any thread."""
        if os.getpid() == self._pid and self._session.active:
            self._add(what, duration_ns, frame, reason=reason)

    def note_inputs(self, args: Any, kwargs: Any, unit: int = NO_UNIT) -> None:
        """Add the inputs of a forward to the batch of the step, if the model begins with it.

        Without a unit around all others, each of them is the outermost one. Only the unit that ran
        first in the step receives the batch.

        Args:
            args: Positional arguments of the forward.
            kwargs: Keyword arguments.
            unit: The outermost unit; -1: the whole model.
        """
        session = self._session
        if not session.detail or self._first_unit not in {None, unit}:
            return
        if torch.is_grad_enabled() and not session.in_backward:
            found = _measure_inputs(session.step, args, kwargs)
            if found is not None:
                self._first_unit = unit
                self._batch = _joined(self._batch, found)

    def end_step(self, *, counts: bool) -> None:
        """End a step; only steps that are timed and detailed count."""
        self._note_compilations()
        found, self._now = self._now, {}
        calls, self._calls = self._calls, 0
        batch, self._batch, self._first_unit = self._batch, None, None
        if batch is not None and batch.step == self._session.step - 1:
            self._batches.append(batch)
        if not counts:
            return
        self._num_steps += 1
        if self._num_busy < _ENOUGH_BUSY:
            self._num_read_steps += self._sees_reads
            self._num_busy += calls >= _BUSY
            if self._num_busy == _ENOUGH_BUSY:  # known well enough, and wraps cost much time here
                self._reads.undo()
        for key, (count, duration_ns, *_) in found.items():
            total = self._total.get(key)
            if total is None:
                if len(self._total) >= MOST_STOPS:
                    continue
                total = self._total[key] = [0, 0, 0]
            total[0] += count
            total[1] += duration_ns
            total[2] += 1

    def _note_compilations(self) -> None:
        session = self._session
        new, self._last_compilation = read_compilations(self._last_compilation)
        for each in new:
            number = -1 - len(self._names)
            number = next((n for n, name in self._names.items() if name == each.place), number)
            self._names[number] = each.place
            key = (COMPILATION, number, int(Phase.FORWARD), NO_UNIT)
            counts = self._now.setdefault(key, [0, 0, 0])
            counts[0] += 1
            counts[1] += each.duration_ns
            self._reasons[key] = each.reason
            if each.end_ns > each.start_ns > 0:
                # torch has the wall time. The events have the monotonic clock.
                shift_ns = session.clock.host_now() - time.time_ns()
                start_ns, end_ns = each.start_ns + shift_ns, each.end_ns + shift_ns
                session.add(
                    EventKind.COMPILATION, start_ns, end_ns, session.step - 1, stream=Stream.HOST
                )

    def describe(self) -> HostActivity:
        """What was counted so far."""
        while self._places.new:
            number, place = self._places.new.pop()
            self._names[number] = str(place)
        stops = [
            HostStop(
                what=what,
                place=self._names.get(place, "")[:1000],
                phase=phase,
                unit=unit,
                count=count,
                duration_ns=duration_ns,
                num_steps=steps,
                reason=self._reasons.get((what, place, phase, unit), "")[:1000],
            )
            for (what, place, phase, unit), (count, duration_ns, steps) in self._total.items()
        ]
        places = find_cores(torch.cuda.current_device() if self._on_device else None)
        return HostActivity(
            num_steps=self._num_steps,
            num_read_steps=self._num_read_steps,
            stops=sorted(stops, key=lambda stop: -stop.duration_ns),
            graph_breaks=[
                GraphBreak(place=place[:1000], reason=reason[:1000])
                for place, reason in read_graph_breaks()[:MOST_BREAKS]
            ],
            sees_reads=self._sees_reads,
            batches=[
                BatchWork(step=step, size=size, is_tokens=is_tokens, used=used, longest=longest)
                for step, size, is_tokens, used, longest in self._batches
            ],
            num_threads=torch.get_num_threads(),
            num_cores=len(parse_cores(places.cores)),
            cores=places.cores,
            core_nodes=places.core_nodes,
            device_node=places.device_node,
        )


def _time_nothing() -> int:
    """The time that a timed call of nothing takes: the shortest of 300."""
    now, times = time.perf_counter_ns, []

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for _ in range(300):
        start_ns = now()
        nothing()
        times.append(now() - start_ns)
    return min(times)


@unseen
def _is_on_host(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_cpu", False))


@unseen
def _name_copy(source: torch.Tensor, result: Any, options: dict[str, Any]) -> str:
    """The name of a copy between host and device that stops the host; empty: it does not."""
    if _is_on_host(source) == _is_on_host(result):
        return ""
    if _is_on_host(source):
        return "" if source.is_pinned() else PAGEABLE_COPY
    return "" if options.get("non_blocking") else '.to("cpu")'


def _has_mask(args: Any) -> bool:
    """Whether a tensor is indexed by a boolean mask; `args` are the tensor and the index."""
    key = args[-1]
    if type(key) is int or type(key) is slice:  # the usual ones
        return False
    for each in key[:_MOST_MASKS] if type(key) is tuple else (key,):
        if isinstance(each, torch.Tensor) and _is_boolean(each):
            return True
    return False


@unseen
def _is_boolean(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bool


# --- Measure the inputs of a forward.

_MASKS = ("attention_mask", "padding_mask", "mask")


class _Batch(NamedTuple):
    """The fields of a `BatchWork`, which costs too much in a step."""

    step: int
    size: int
    is_tokens: bool
    used: int | None
    longest: int


@unseen
def _measure_inputs(step: int, args: Any, kwargs: Any) -> _Batch | None:
    """The size of the first tensor; None: the model receives none."""
    given = {**{str(place): each for place, each in enumerate(args)}, **kwargs}
    if len(given) == 1 and isinstance(only := next(iter(given.values())), dict):
        given = only
    mask = next((given[name] for name in _MASKS if isinstance(given.get(name), torch.Tensor)), None)
    first = next(
        (each for each in given.values() if isinstance(each, torch.Tensor) and each is not mask),
        None,
    )
    if first is None or first.dim() == 0:
        return None
    is_tokens = not first.is_floating_point() and first.dtype is not torch.bool
    used = None
    if mask is not None and type(mask) is torch.Tensor and mask.device.type == "cpu":
        is_plain = mask.shape == first.shape and not mask.is_floating_point()
        used = int(mask.detach().ne(0).sum()) if is_plain else None
    return _Batch(
        step,
        first.numel() if is_tokens else first.shape[0],
        is_tokens,
        used,
        first.shape[1] if is_tokens and first.dim() > 1 else 0,
    )


def _joined(batch: _Batch | None, other: _Batch) -> _Batch:
    if batch is None or batch.step != other.step:
        return other
    is_known = batch.used is not None and other.used is not None
    return _Batch(
        other.step,
        batch.size + other.size,
        other.is_tokens,
        (batch.used or 0) + (other.used or 0) if is_known else None,
        max(batch.longest, other.longest),
    )
