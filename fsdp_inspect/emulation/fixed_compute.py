"""How long does a module compute, when that is decreed? For telling a schedule's error from noise.

`forward=2ms,backward=4ms` makes each part of a model (the trainer: attention, feed-forward,
embedding, output projection) last that long from entry to exit, in forward, recomputation and
backward; `forward=3ns/param` counts the parameters of the part instead. On CPU the thread sleeps
after the real computation until the time is over; a part whose real computation lasts longer is
counted as an overrun. FSDP's own work inside a part (copies, waits, issuing) is not counted, so
that plans which split or merge units keep the total. On CUDA a spinning kernel of that length is
added behind the part's own kernels: no part can be shorter than its real computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

from fsdp_inspect.emulation.fixed_times import FixedTimes
from fsdp_inspect.emulation.network import sleep_until
from fsdp_inspect.emulation.process import Emulation


class FixedCompute:
    """Makes the parts of a model last their times."""

    def __init__(self, times: FixedTimes, emulation: Emulation, device: torch.device) -> None:
        self.num_spans = 0
        """How many forwards and backwards of parts there were."""
        self.num_overruns = 0
        """How many of them lasted longer than decreed; unknown (0) on CUDA."""
        self._times = times
        self._waits = emulation.waits
        self._spin = _spinner(emulation, device) if device.type == "cuda" else None
        self._recompute_ns = 0
        # Checkpointing would leave a repeated forward before our hook behind it.
        emulation.undo.enter_context(set_checkpoint_early_stop(False))
        emulation.settings["fixed_compute"] = times.to_dict()

    def attach(self, parts: Mapping[str, nn.Module]) -> None:
        """Put hooks on the parts, by name; call it after `fully_shard`.

        No part may lie inside another one.
        """
        for module in parts.values():
            ModuleHooks(self, module, sum(parameter.numel() for parameter in module.parameters()))

    def now_ns(self) -> int:
        """The host's time less what FSDP and recomputation have taken of it."""
        return time.perf_counter_ns() - self._waits.fsdp_ns - self._recompute_ns

    def last(self, begin_ns: int, duration_ns: int) -> None:
        """Hold the thread (CUDA: the stream) until a span that began then has lasted so long."""
        self.num_spans += 1
        if self._spin is not None:
            self._spin(duration_ns)
            return
        left = begin_ns + duration_ns - self.now_ns()
        if left < 0:
            self.num_overruns += 1
        else:
            sleep_until(time.perf_counter_ns() + left)

    def leave_forward(self, begin_ns: int, num_parameters: int) -> None:
        """The forward of a part is over; one that backward repeats is no part of its time."""
        self.last(begin_ns, self._times.forward.of(num_parameters))
        if torch._C._current_graph_task_id() != -1:
            self._recompute_ns += self.now_ns() - begin_ns

    def leave_backward(self, begin_ns: int, num_parameters: int) -> None:
        """The backward of a part is over."""
        self.last(begin_ns, self._times.backward.of(num_parameters))


class ModuleHooks:
    """The hooks on one module.

    FSDP's pre-forward hook runs before ours and its post-forward hook after ours. In backward a
    part begins at the node that made its output, behind every hook on that tensor: FSDP's, and that
    of the next part, whose backward ends there.
    """

    def __init__(self, fixed: FixedCompute, module: nn.Module, num_parameters: int) -> None:
        self._fixed = fixed
        self._num_parameters = num_parameters
        self._forwards: list[int] = []
        self._backwards: list[int] = []
        self._gives_gradients = False
        module.register_forward_pre_hook(self._enter_forward, with_kwargs=True)
        module.register_forward_hook(self._leave_forward, prepend=True)

    def _enter_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = _first_with_gradient((args, kwargs))
        self._gives_gradients = first is not None
        if first is not None:
            first.register_hook(self._leave_backward)  # type: ignore[no-untyped-call]
        self._forwards.append(self._fixed.now_ns())

    def _leave_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._fixed.leave_forward(self._forwards.pop(), self._num_parameters)
        first = _first_with_gradient(output)
        if first is not None and first.grad_fn is not None:
            gives = self._gives_gradients
            first.grad_fn.register_prehook(self._enter_backward if gives else self._pass_backward)

    def _enter_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        self._backwards.append(self._fixed.now_ns())

    def _leave_backward(self, gradient: torch.Tensor) -> None:
        if self._backwards:
            self._fixed.leave_backward(self._backwards.pop(), self._num_parameters)

    def _pass_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """An embedding: nothing says when its backward ends, so its time passes before it."""
        self._fixed.leave_backward(self._fixed.now_ns(), self._num_parameters)


def _first_with_gradient(values: Any) -> torch.Tensor | None:
    if not torch.is_grad_enabled():
        return None
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value
    return None


def _spinner(emulation: Emulation, device: torch.device) -> Callable[[int], None]:
    spinning = emulation.spinning_device(device)
    return lambda duration_ns: spinning.spin(duration_ns, spinning.current_stream())
