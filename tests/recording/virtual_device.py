"""Emulate a device: streams and events on virtual time, under torch's real FSDP2 code.

Work is a duration on a stream, and the host is a clock that the caller advances. All work is logged
with its true times, so that tests can compare the recording with the truth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

MS = 1_000_000


class VirtualStream:
    """A queue; `free_ns` is the end of all enqueued work, on the device's clock."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.free_ns = 0

    def run(self, duration_ns: int, not_before_ns: int = 0) -> tuple[int, int]:
        """Enqueue work; returns its start and end."""
        start = max(self.free_ns, self.device.now_ns, not_before_ns)
        self.free_ns = start + duration_ns
        return start, self.free_ns

    def wait_stream(self, other: VirtualStream) -> None:
        self.free_ns = max(self.free_ns, other.free_ns)

    def wait_event(self, event: VirtualEvent) -> None:
        self.free_ns = max(self.free_ns, event.ns)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        event = event or VirtualEvent(self.device)
        event.record(self)
        return event


class VirtualEvent:
    """The moment at which a stream has run everything before it."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.ns = 0

    def record(self, stream: VirtualStream | None = None) -> VirtualEvent:
        stream = stream or self.device.current
        self.ns = max(stream.free_ns, self.device.now_ns)
        return self

    def wait(self, stream: VirtualStream | None = None) -> None:
        (stream or self.device.current).wait_event(self)

    def synchronize(self) -> None:
        self.device.now_ns = max(self.device.now_ns, self.ns)


@dataclass
class VirtualDevice:
    """Streams, a host clock and a log of the work; also an `EventBackend` for `CudaClock`."""

    clock_offset_ns: int = 7_000_000_000
    """The device's clock minus the host's. The recorder must determine it."""
    now_ns: int = 0
    """The device's clock now. The host's clock is less by the offset."""
    log: list[tuple[str, str, int, int]] = field(default_factory=list)
    """The executed work: kind, unit, start, end, on the host's clock."""

    def __post_init__(self) -> None:
        self.now_ns = self.clock_offset_ns
        self.compute = VirtualStream(self)
        self._stack = [self.compute]
        self.link_free_ns = 0
        self.num_events = 0
        """The events that the clock has made; others come from its pool."""

    @property
    def current(self) -> VirtualStream:
        return self._stack[-1]

    def spend(self, duration_ns: int) -> None:
        """Keep the host busy."""
        self.now_ns += duration_ns

    def run(self, kind: str, unit: str, duration_ns: int) -> None:
        """Enqueue work on the current stream and log its time."""
        self._note(kind, unit, *self.current.run(duration_ns))

    def transfer(self, kind: str, unit: str, duration_ns: int) -> None:
        """Enqueue a collective. The link runs one at a time, in the order of issue."""
        start, end = self.current.run(duration_ns, self.link_free_ns)
        self.link_free_ns = end
        self._note(kind, unit, start, end)

    def _note(self, kind: str, unit: str, start: int, end: int) -> None:
        self.log.append((kind, unit, start - self.clock_offset_ns, end - self.clock_offset_ns))

    # --- the interface of torch's device handle

    def Stream(self, priority: int = 0) -> VirtualStream:
        return VirtualStream(self)

    def Event(self, *args: Any, **kwargs: Any) -> VirtualEvent:
        return VirtualEvent(self)

    def current_stream(self, device: Any = None) -> VirtualStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: VirtualStream) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    # --- the interface of a backend of `CudaClock`

    def new_event(self) -> VirtualEvent:
        self.num_events += 1
        return VirtualEvent(self)

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        event.record(stream)

    def query(self, event: VirtualEvent) -> bool:
        return event.ns <= self.now_ns

    def elapsed_ms(self, start: VirtualEvent, end: VirtualEvent) -> float:
        assert max(start.ns, end.ns) <= self.now_ns, "read before the event completed"
        return float(torch.tensor((end.ns - start.ns) / MS, dtype=torch.float32))

    def synchronize(self, event: VirtualEvent) -> None:
        event.synchronize()

    def new_stream(self) -> VirtualStream:
        return VirtualStream(self)

    def host_ns(self) -> int:
        return self.now_ns - self.clock_offset_ns

    def pause(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@contextlib.contextmanager
def fsdp_on(device: VirtualDevice, *, copy_ns: int = 0) -> Iterator[None]:
    """Make torch's FSDP2 use the streams and events of the virtual device.

    The copies of the shards into an all-gather take `copy_ns` on torch's stream.
    """
    modules: list[Any] = [_fsdp_collectives, _fsdp_param_group, _fsdp_state]
    saved = [module._get_device_handle for module in modules]
    for module in modules:
        module._get_device_handle = lambda *args, **kwargs: device
    copy = _fsdp_collectives._get_param_all_gather_inputs

    def timed_copy(params: Any) -> Any:
        device.run("copy_in", "", copy_ns)
        return copy(params)

    _fsdp_collectives._get_param_all_gather_inputs = timed_copy
    current_stream = torch.accelerator.current_stream
    torch.accelerator.current_stream = device.current_stream  # used when a gather is dropped
    try:
        yield
    finally:
        torch.accelerator.current_stream = current_stream
        _fsdp_collectives._get_param_all_gather_inputs = copy
        for module, handle in zip(modules, saved, strict=True):
            module._get_device_handle = handle


class VirtualWork(dist.Work):
    """An asynchronous collective on a stream of its process group, like NCCL's."""

    def __init__(self, device: VirtualDevice, end: VirtualEvent) -> None:
        super().__init__()
        self._device, self._end = device, end

    def wait(self, *args: Any) -> bool:
        self._device.current.wait_event(self._end)
        return True


class TimedGather(DefaultAllGather):
    """An all-gather with a given duration on the link."""

    def __init__(self, device: VirtualDevice, unit: str, duration_ns: int) -> None:
        self._device = device
        self._run = lambda: device.transfer("all_gather", unit, duration_ns)

    def __call__(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        device = self._device
        if not async_op:
            self._run()
            return super().__call__(*args, async_op=False, **kwargs)
        issuing, nccl = device.current, VirtualStream(device)
        nccl.wait_stream(issuing)
        with device.stream(nccl):
            self._run()
        super().__call__(*args, async_op=True, **kwargs)
        return VirtualWork(device, nccl.record_event())


class TimedScatter(DefaultReduceScatter):
    """A reduce-scatter with a given duration on the link."""

    def __init__(self, device: VirtualDevice, unit: str, duration_ns: int) -> None:
        self._run = lambda: device.transfer("reduce_scatter", unit, duration_ns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._run()
        return super().__call__(*args, **kwargs)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: TimedBlock) -> torch.Tensor:
        ctx.block = block
        block.device.spend(block.host_ns)
        block.device.run("forward", block.unit, block.forward_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        block = ctx.block
        block.device.spend(block.host_ns)
        block.device.run("backward", block.unit, 2 * block.forward_ns)
        return gradients[0], None


class TimedBlock(nn.Module):
    """A linear layer with a given forward time on the compute stream; backward takes twice it."""

    def __init__(self, device: VirtualDevice, unit: str, forward_ns: int, host_ns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.device = device
        self.unit = unit
        self.forward_ns = forward_ns
        self.host_ns = host_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Work.apply(self.linear(x), self)


class TimedModel(nn.Module):
    """Blocks in sequence, and a head that belongs to the root."""

    def __init__(
        self, device: VirtualDevice, *, blocks: int, forward_ns: int, host_ns: int
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TimedBlock(device, f"layers.{i}", forward_ns, host_ns) for i in range(blocks)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
