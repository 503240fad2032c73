"""Watch when the training clips gradients: between backwards, while scaled, after the update.

The functions of torch that clip are wrapped, and those of FSDP1 and of the gradient scalers. Only
the order of the calls is noted, and no value of a gradient is read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_inspect.recording.accumulation_watch import Mark, mark_of
from fsdp_inspect.recording.code_places import find_calling_line
from fsdp_inspect.recording.patches import Guard, Patches, wrap_call
from fsdp_inspect.recording.torch_api.autograd import CLIPS, loss_scale
from fsdp_inspect.trace.correctness import ClipSeen

_PLACES = 4
_CALLS = 64
"""Calls that are judged: a loop may clip each parameter by itself."""
_PARAMETERS = 8


class _Call:
    """The last call that clips, until a backward or an update follows."""

    def __init__(self, place: str, marks: dict[ref[torch.Tensor], Mark], num_before: int) -> None:
        self.place = place
        self.marks = marks
        self.num_before = num_before
        """Backwards between the update before and the call."""
        self.is_kept = False
        """Whether the backward that runs found the gradients as the call left them."""

    def marks_now(self) -> dict[ref[torch.Tensor], Mark]:
        """The gradients now."""
        held = {each: each() for each in self.marks}
        return {each: None if own is None else mark_of(own.grad) for each, own in held.items()}


class ClipWatch:
    """The calls that clip gradients, by the user's line.

    Args:
        observe: Runs an observation; an error of it ends the observations.
    """

    def __init__(self, observe: Callable[[Callable[[], None]], None]) -> None:
        self._observe = observe
        self._seen: dict[str, ClipSeen] = {}
        self._scale = 1.0
        """The number by which a scaler multiplied a loss, and has not divided the gradients."""
        self._num_backwards = 0
        """Backwards since the last update."""
        self._has_updated = False
        self._num_calls = 0
        self._last: _Call | None = None

    @property
    def seen(self) -> list[ClipSeen]:
        """The calls of each line."""
        return list(self._seen.values())

    def attach(self, patches: Patches, guard: Guard) -> None:
        """Wrap the functions that clip, and those that scale."""

        def wrap(target: Any, name: str, see: Callable[..., None]) -> None:
            def after(given: tuple[Any, ...], _: Any) -> None:
                self._observe(lambda: see(*given))

            if (original := getattr(target, name, None)) is not None:
                recorded = wrap_call(original, lambda *given, **_: given, after, guard)
                patches.set_attribute(target, name, recorded)

        for target, name in CLIPS:
            wrap(target, name, self._see_clip)
        wrap(FullyShardedDataParallel, "clip_grad_norm_", self._see_clip_of_model)
        module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
        kinds = [GradScaler] if module is None else [GradScaler, module.ShardedGradScaler]
        for kind in kinds:
            wrap(kind, "scale", self._see_scale)
            wrap(kind, "unscale_", self._see_unscale)

    def _see_scale(self, scaler: GradScaler, *_: Any) -> None:
        self._scale = loss_scale(scaler)

    def _see_unscale(self, *_: Any) -> None:
        self._scale = 1.0

    def _see_clip_of_model(self, model: Any, limit: Any = 0.0, *_: Any) -> None:
        self._see_clip(list(model.parameters()), limit)

    def _see_clip(self, parameters: Any, limit: Any = 0.0, *_: Any) -> None:
        is_number = isinstance(limit, int | float)
        if is_number and not math.isfinite(limit):  # it only measures the norm
            return
        self._num_calls += 1
        if self._num_calls > _CALLS:
            return
        place = find_calling_line(sys._getframe(1))
        if place not in self._seen and len(self._seen) >= _PLACES:
            return
        before = self._seen.get(place, ClipSeen(place=place, limit=0.0))
        held = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        known = held if isinstance(held, list | tuple) else ()  # a generator has ended
        with_gradient = [each for each in known if each.grad is not None][:_PARAMETERS]
        used = float(limit) if is_number else before.limit
        is_scaled = self._scale > max(used, 1.0)  # otherwise the limit may be multiplied, too
        self._seen[place] = before.model_copy(
            update={
                "limit": used,
                "num_calls": before.num_calls + 1,
                "num_scaled": before.num_scaled + is_scaled,
                "scale": max(before.scale, self._scale),
                "num_empty": before.num_empty + (bool(known) and not with_gradient),
            }
        )
        marks = {ref(each): mark_of(each.grad) for each in with_gradient}
        self._last = _Call(place, marks, self._num_backwards) if marks else None

    def _count(self, place: str, name: str) -> None:
        seen = self._seen[place]
        self._seen[place] = seen.model_copy(update={name: getattr(seen, name) + 1})

    def before_backward(self) -> None:
        """Look whether a backward finds the gradients as the last call left them."""
        self._num_backwards += 1
        if (last := self._last) is None:
            return
        last.is_kept = last.marks_now() == last.marks
        if not last.is_kept:
            if self._has_updated and last.num_before == 0:
                self._count(last.place, "num_late")
            self._last = None

    def after_backward(self) -> None:
        """Look whether the backward added to these gradients."""
        last, self._last = self._last, None
        if last is not None and last.is_kept and last.num_before:
            if last.marks_now() != last.marks:
                self._count(last.place, "num_early")
            else:  # the backward of another model
                self._last = last

    def after_update(self) -> None:
        """Forget the last call: the update used its gradients."""
        self._num_backwards, self._has_updated, self._last = 0, True, None
