"""FSDP1 on a virtual device: the recorder records a known schedule on streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _init_utils
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.trace.codes import EventKind, Stream

from .virtual_device import MS, TimedBlock, TimedModel, VirtualDevice
from .virtual_wrapped import Recorded

WORLD_SIZE = 4


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def fsdp1_on(device: Any, *, gather_ns: int, scatter_ns: int) -> Iterator[None]:
    """Make torch's FSDP1 use streams of the virtual device; its collectives have given times."""
    device.is_available = lambda: True
    device.current_device = lambda: torch.device("cpu")
    gather = _flat_param.FlatParamHandle._all_gather_flat_param
    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )
    scatter = getattr(dist, name)

    def timed_gather(handle: Any, output: torch.Tensor) -> Any:
        device.transfer("all_gather", "", gather_ns)
        return gather(handle, output)

    @functools.wraps(scatter)  # the recorder reads its signature
    def timed_scatter(*args: Any, **kwargs: Any) -> Any:
        device.transfer("reduce_scatter", "", scatter_ns)
        return scatter(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for module in (_flat_param, _init_utils):
            patch.setattr(module._FSDPDeviceHandle, "from_device", lambda *args: device)
        patch.setattr(_flat_param.FlatParamHandle, "_all_gather_flat_param", timed_gather)
        patch.setattr(dist, name, timed_scatter)
        yield


def train_fsdp1(*, gather_ms: float, scatter_ms: float, forward_ms: float = 4) -> Recorded:
    device = VirtualDevice()
    times = {"gather_ns": int(gather_ms * MS), "scatter_ns": int(scatter_ms * MS)}
    with fsdp1_on(device, **times):
        model = TimedModel(device, blocks=4, forward_ns=int(forward_ms * MS), host_ns=int(0.1 * MS))
        policy = ModuleWrapPolicy({TimedBlock})
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        return Recorded(device, wrapped)


@pytest.fixture(scope="module")
def flat() -> Recorded:
    return train_fsdp1(gather_ms=6, scatter_ms=6)


@pytest.mark.parametrize("kind", [EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER])
def test_collectives_of_fsdp1_end_when_they_do_on_the_device(
    flat: Recorded, kind: EventKind
) -> None:
    recorded, happened = flat.spans(kind), flat.happened(kind.label)
    assert len(recorded) == len(happened) > 4
    for (start, end), (begin, finish) in zip(recorded, happened, strict=True):
        assert end == pytest.approx(finish, abs=200)
        assert start <= begin + 200


def test_collectives_of_fsdp1_are_on_the_streams_of_their_kind(flat: Recorded) -> None:
    events = flat.events
    streams = {
        EventKind(kind): Stream(stream)
        for kind, stream in zip(events.kind, events.stream, strict=True)
    }
    assert streams[EventKind.ALL_GATHER] is Stream.ALL_GATHER
    assert streams[EventKind.REDUCE_SCATTER] is Stream.REDUCE_SCATTER


def test_the_compute_stream_waits_for_a_gather_until_it_ends(flat: Recorded) -> None:
    gathers = {
        int(row): int(end)
        for row, end, kind in zip(
            flat.events.collective, flat.events.end_ns, flat.events.kind, strict=True
        )
        if kind == EventKind.ALL_GATHER
    }
    waits = flat.events.where(flat.events.kind == EventKind.ALL_GATHER_WAIT)
    assert len(waits) == len(gathers)
    for at in range(len(waits)):
        end = gathers[int(waits.collective[at])]
        assert waits.end_ns[at] == max(int(waits.start_ns[at]), end)


def test_the_reductions_of_fsdp1_are_waited_for_after_the_last_backward(flat: Recorded) -> None:
    last_backward = max(end for _, end in flat.happened("backward"))
    waits = flat.spans(EventKind.REDUCE_SCATTER_WAIT)
    assert min(start for start, _ in waits) >= last_backward - 200
    assert waits[-1][1] == pytest.approx(flat.happened("reduce_scatter")[-1][1], abs=200)


def test_forwards_of_fsdp1_hold_the_compute_of_their_unit(flat: Recorded) -> None:
    happened = flat.happened("forward")
    for place in range(4):
        [(start, end)] = flat.spans(EventKind.FORWARD, f"layers.{place}")
        assert start <= happened[place][0] + 200
        assert end == pytest.approx(happened[place][1], abs=200)
