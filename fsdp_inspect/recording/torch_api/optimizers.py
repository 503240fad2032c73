"""List the tensors of an optimizer, and the optimizer steps around the one whose hook is called.

torch wraps the `step` of each class of optimizers and calls the hooks inside. They run twice for
one update if a subclass calls the `step` of its parent, and for two optimizers if one steps the
other. The stack of calls shows which steps enclose a step; after an exception it shows none.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch


def updated_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer updates."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _code_around_step() -> CodeType | None:
    """The code with which torch wraps a `step`; None: this version of torch has another one."""
    try:
        wrap: Any = torch.optim.Optimizer.profile_hook_step
        code = wrap(lambda optimizer: None).__code__
    except (AttributeError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


_AROUND_STEP = _code_around_step()


def _frames_around() -> list[FrameType]:
    """The frames of `_AROUND_STEP` around that of the current step, innermost first.

    It walks the stack: about 0.1 us for each frame.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _AROUND_STEP:
            found.append(frame)
        frame = frame.f_back
    return found[1:]


def _holds_optimizers(optimizer: Any) -> bool:
    for each in vars(optimizer).values():
        members = each if isinstance(each, list | tuple) else (each,)
        if any(isinstance(one, torch.optim.Optimizer) for one in members):
            return True
    return False


class Nesting:
    """Which optimizers step others, such as torchtitan's container or ZeroRedundancyOptimizer."""

    def __init__(self) -> None:
        self._steps_others: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def find_around(self, optimizer: Any) -> list[Any]:
        """The optimizers whose `step` encloses that of `optimizer`, innermost first.

        Call it from a hook of its step.
        """
        around = []
        for frame in _frames_around():
            seen = frame.f_locals
            for each in seen.get("args", ())[:1]:
                around.append(each)
                # With a result, the step is over and its hooks run: one of them steps the other.
                if each is not optimizer and "out" not in seen:
                    self._steps_others[each] = True
        return around

    def steps_others(self, optimizer: Any) -> bool:
        """Whether an optimizer steps others. Before its first step has ended, this is a guess."""
        known = self._steps_others.get(optimizer)
        return _holds_optimizers(optimizer) if known is None else known

    def note_end(self, optimizer: Any) -> None:
        """Note that a step has ended: if no other optimizer stepped in it, none will."""
        self._steps_others.setdefault(optimizer, False)
