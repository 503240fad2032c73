"""Give the parts of a model fixed compute times, to separate a schedule's error from noise.

`forward=2ms,backward=4ms` makes each part of a model (in the trainer: attention, feed-forward,
embedding, output projection) last that long from entry to exit, in forward, recompute and backward.
`forward=3ns/param` multiplies by the number of the part's parameters instead.

On CPU the thread sleeps after the real computation until the time is over. A part whose real
computation lasts longer counts as an overrun. FSDP's own work inside a part (copies, waits,
issuing) does not count, so that plans which split or merge units keep the total. On CUDA a kernel
that spins for that time follows the part's own kernels: no part can be shorter than its real
computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from fsdp_inspect.emulation.fixed_times import FixedTimes
from fsdp_inspect.emulation.network import sleep_until
from fsdp_inspect.emulation.process import Emulation
from fsdp_inspect.recording.torch_api.autograd import current_graph_task_id
from fsdp_inspect.recording.torch_api.dispatch import tree_leaves


class FixedCompute:
    """Extends the parts of a model to their fixed times."""

    def __init__(self, times: FixedTimes, emulation: Emulation, device: torch.device) -> None:
        self.num_spans = 0
        """The number of forwards and backwards of parts."""
        self.num_overruns = 0
        """The number of spans that lasted longer than their fixed time; unknown (0) on CUDA."""
        self._times = times
        self._waits = emulation.waits
        self._spin = _spinner(emulation, device) if device.type == "cuda" else None
        self._recompute_ns = 0
        # Checkpointing would end a repeated forward early, before its exit hook runs.
        emulation.undo.enter_context(set_checkpoint_early_stop(False))
        emulation.settings["fixed_compute"] = times.to_dict()

    def attach(self, parts: Mapping[str, nn.Module]) -> None:
        """Install hooks on the parts, by name; call it after `fully_shard`.

        No part may contain another part.
        """
        for module in parts.values():
            ModuleHooks(self, module, sum(parameter.numel() for parameter in module.parameters()))

    def now_ns(self) -> int:
        """The host's time minus the time spent in FSDP and in recompute."""
        return time.perf_counter_ns() - self._waits.fsdp_ns - self._recompute_ns

    def last(self, begin_ns: int, duration_ns: int) -> None:
        """Block the thread (CUDA: the stream) until the given time has passed since `begin_ns`."""
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
        """End the forward of a part; a forward repeated in backward is not part of its time."""
        self.last(begin_ns, self._times.forward.of(num_parameters))
        if current_graph_task_id() != -1:
            self._recompute_ns += self.now_ns() - begin_ns

    def leave_backward(self, begin_ns: int, num_parameters: int) -> None:
        """End the backward of a part."""
        self.last(begin_ns, self._times.backward.of(num_parameters))


class ModuleHooks:
    """The hooks on one module.

    FSDP's pre-forward hook runs before this hook and its post-forward hook after it. In backward a
    part begins at the node that made its output, after all hooks on that tensor. These are FSDP's
    hooks and the hook of the next part, whose backward ends there.
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
        """Spend the time of an embedding before its backward, whose end no hook marks."""
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
