"""DDP on a virtual device: the recorder records a known schedule on streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_inspect.recording.sharders import ddp
from fsdp_inspect.trace.codes import EventKind, Method

from .virtual_device import MS, TimedModel, VirtualDevice, VirtualStream
from .virtual_wrapped import Recorded


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """One rank with a real group, because the reducer reads the results of its all-reduces."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class FakeFuture:
    """The future of a collective on a stream of its process group, like NCCL's."""

    def __init__(self, device: VirtualDevice, end: Any) -> None:
        self._device, self._end = device, end

    def wait(self) -> None:
        self._device.current.wait_event(self._end)


class FakeWork:
    def __init__(self, future: FakeFuture) -> None:
        self._future = future

    def get_future(self) -> FakeFuture:
        return self._future


class SideStream(VirtualStream):
    """A stream of torch as a context manager."""

    def __enter__(self) -> SideStream:
        self.device._stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.device._stack.pop()


@pytest.fixture
def replicated(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A model with a bucket for two blocks each, whose all-reduces take 20 ms on the device."""
    device = VirtualDevice()
    link = VirtualStream(device)
    observe = ddp.BucketHooks._observe

    def observed(hooks: Any, tensors: Any, group: Any, issue: Callable[[], Any]) -> Any:
        def timed() -> tuple[Any, FakeWork]:
            result, _ = issue()
            link.wait_stream(device.current)
            with device.stream(link):
                device.run("all_reduce", "", 20 * MS)
            return result, FakeWork(FakeFuture(device, link.record_event()))

        return observe(hooks, tensors, group, timed)

    monkeypatch.setattr(ddp.BucketHooks, "_observe", observed)
    monkeypatch.setattr(ddp.torch, "Stream", lambda on: SideStream(device))
    model = TimedModel(device, blocks=4, forward_ns=4 * MS, host_ns=int(0.1 * MS))
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    return Recorded(device, wrapped)


def test_all_reduces_of_ddp_have_the_times_of_the_device(replicated: Recorded) -> None:
    assert len(replicated.units) > 1
    recorded, happened = replicated.spans(EventKind.ALL_REDUCE), replicated.happened("all_reduce")
    assert len(recorded) == len(happened) == len(replicated.units)
    for (start, end), (begin, finish) in zip(recorded, happened, strict=True):
        assert end == pytest.approx(finish, abs=200)
        assert start == pytest.approx(begin, abs=200)


def test_a_queued_all_reduce_has_an_inferred_start(replicated: Recorded) -> None:
    reductions = replicated.events.where(replicated.events.kind == EventKind.ALL_REDUCE)
    assert set(reductions.method.tolist()) == {Method.INFERRED}


def test_the_compute_stream_waits_for_the_buckets_one_after_the_other(
    replicated: Recorded,
) -> None:
    waits = replicated.spans(EventKind.ALL_REDUCE_WAIT)
    last_backward = max(end for _, end in replicated.happened("backward"))
    assert waits[0][0] == pytest.approx(last_backward, abs=200)
    assert [end for _, end in waits] == [
        pytest.approx(max(end, last_backward), abs=200)
        for _, end in replicated.happened("all_reduce")
    ]
