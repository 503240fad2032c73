"""The current position in the training: step, microbatch, phase and running unit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fsdp_inspect.trace.codes import NO_UNIT, Phase


class Position:
    """The position, which the hooks of a recording keep and read.

    It has slots, because the hooks run with cold processor caches: see [Note: Cold code] in
    `unit_timing`.
    """

    __slots__ = (
        "depths",
        "execution_known",
        "execution_order",
        "explicit_steps",
        "hook_unit",
        "in_backward",
        "in_outer_optimizer",
        "in_step",
        "inputs",
        "is_memory_step",
        "loader_ended_ns",
        "loader_ended_step",
        "loss_dtype",
        "microbatch",
        "num_collectives",
        "open_units",
        "opened_ns",
        "phase",
        "samples_boundaries",
        "skips_reduction",
        "step",
        "step_start",
        "training_thread",
        "unit_depths",
        "watches_memory",
        "will_repeat",
    )

    def __init__(self) -> None:
        self.training_thread = threading.get_ident()
        """The thread of the last forward of a unit; before that, the thread that attached."""
        self.step = self.microbatch = 0
        self.step_start: Any = None
        self.opened_ns: int | None = None
        """The host time at which step 0 began; None before it."""
        self.phase: Phase = Phase.OUTSIDE
        self.in_step = self.explicit_steps = self.in_backward = False
        """Whether `recorder.step()` is open. Whether the script uses it at all; otherwise steps end
        at the optimizer's step. Whether a backward runs."""
        self.in_outer_optimizer = False
        """Whether an outer optimizer is in its step, which contains steps of a torch optimizer."""
        self.will_repeat = False
        """Whether the first forward of a reentrant checkpoint runs, which has no gradients."""
        self.hook_unit = NO_UNIT
        """The unit whose FSDP hook is on the host's stack; -1: none."""
        self.open_units: list[int] = []
        """Units whose forward or backward is open, outermost first. In backward, a unit around
        the last one opens after it."""
        self.unit_depths: Sequence[int] = ()
        """The depth of each unit's first module in the model."""
        self.execution_order: list[int] = []
        """Units in the order of the first recorded forward."""
        self.execution_known = False
        self.depths: dict[int, int] = {}
        """The recorded collectives that each thread is inside of, by its identifier."""
        self.num_collectives = 0
        """The recorded collectives, whose number connects the rows of each."""
        self.is_memory_step = False
        """Whether the times of this step do not count."""
        self.samples_boundaries = False
        """Whether this step reads the allocator's counters at unit boundaries."""
        self.watches_memory = False
        """Whether this step records any memory data at unit boundaries."""
        self.loader_ended_ns, self.loader_ended_step = 0, -1
        """The time at which the training's data loader last ended, and its step; 0: never."""
        self.loss_dtype = ""
        """Dtype of the tensor of the first backward: `float32`; empty before it."""
        self.inputs = ""
        """The tensors that the first unit received in the last memory step: `4 x 2048 int64`."""
        self.skips_reduction = False
        """Whether a backward left gradients unreduced (`set_requires_gradient_sync(False)`)."""

    @property
    def collective_depth(self) -> int:
        """Above 0 inside a recorded collective of this thread."""
        return self.depths.get(threading.get_ident(), 0)

    def is_background(self) -> bool:
        """Whether this is a thread of the script other than the training and autograd threads."""
        if threading.get_ident() == self.training_thread:
            return False
        return not isinstance(threading.current_thread(), threading._DummyThread)

    def issuing_unit(self) -> int:
        """The unit whose hook is issuing now; -1 means the training script."""
        if self.hook_unit != NO_UNIT:
            return self.hook_unit
        return self.open_units[-1] if self.open_units else NO_UNIT

    def repeating_unit(self) -> int:
        """The innermost open unit by its depth in the model; -1: none."""
        depths = self.unit_depths
        return max(
            reversed(self.open_units),
            key=lambda unit: depths[unit] if unit < len(depths) else 0,
            default=NO_UNIT,
        )

    def close_unit(self, unit: int) -> None:
        """Take a unit off the stack; backward does not close units strictly in nested order."""
        opened = self.open_units
        if opened and opened[-1] == unit:
            opened.pop()
            return
        for place in range(len(opened) - 1, -1, -1):
            if opened[place] == unit:
                del opened[place]
                return

    def note_execution(self, unit: int) -> None:
        """Record that a unit runs in the first forward."""
        if unit not in self.execution_order:
            self.execution_order.append(unit)
