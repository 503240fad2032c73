"""ZeRO-2 on a virtual device: DeepSpeed's waits are recorded, and predicted for other settings.

The engine repeats the order of calls and streams of DeepSpeed 0.19 (`stage_1_and_2.py`), which is
not installed here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.simulation.buckets import measure_buckets, predict_buckets
from fsdp_inspect.simulation.network import CostLine, Network
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import InMemoryRun, RunBuilder

from .virtual_device import MS, TimedModel, VirtualDevice, VirtualStream
from .virtual_wrapped import Recorded

LATENCY_NS, NS_PER_ELEMENT = 2 * MS, 10_000
FINE, COARSE = 350, 640
"""Each first gradient of a coarse bucket is that of a fine one, so its time is known."""
_LINE = CostLine(LATENCY_NS, 4 * bus_factor(EventKind.ALL_REDUCE, 4) / NS_PER_ELEMENT * 1e9)
NETWORK = Network({EventKind.ALL_REDUCE: _LINE})


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class DeepSpeedZeroOptimizer:
    """Fills and reduces buckets like ZeRO-2."""

    partition_gradients = True

    def __init__(self, device: VirtualDevice, model: nn.Module, size: int, *, overlaps: bool):
        self._device = device
        self._parameters = list(model.parameters())
        self._stream = VirtualStream(device) if overlaps else device.compute
        self._num_seen = 0
        self.overlap_comm = overlaps
        self.reduce_bucket_size = size
        self.dp_process_group = dist.group.WORLD
        self.bit16_groups = [self._parameters]
        self.bit16_groups_flat: list[torch.Tensor] = []
        self.real_dp_process_group: list[dist.ProcessGroup] = []
        self.ipg_buckets = {torch.float32: SimpleNamespace(params=[], buffer=[])}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    def get_param_id(self, parameter: nn.Parameter) -> int:
        return next(at for at, each in enumerate(self._parameters) if each is parameter)

    @property
    def _num_elements(self) -> int:
        members = self.ipg_buckets[torch.float32].params
        return sum(self._parameters[number].numel() for _, _, number in members)

    def _add(self, parameter: nn.Parameter) -> None:
        if self._num_elements + parameter.numel() > self.reduce_bucket_size:
            self._reduce()
        number = self.get_param_id(parameter)
        self.ipg_buckets[torch.float32].params.append((0, number, number))
        self._num_seen += 1
        if self._num_seen % len(self._parameters) == 0:
            self.independent_gradient_partition_epilogue()

    def _reduce(self) -> None:
        self.average_tensor(torch.zeros(self._num_elements), torch.float32)
        self.ipg_buckets[torch.float32].params.clear()

    def average_tensor(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
        if self.overlap_comm:
            self._stream.wait_stream(self._device.current)
            self._device.current.wait_stream(self._stream)
        with self._device.stream(self._stream):
            dist.all_reduce(tensor)

    def buffered_reduce_fallback(self, rank: Any, grads: Any, dtype: torch.dtype) -> None:
        raise AssertionError("the gradients are contiguous")

    def independent_gradient_partition_epilogue(self) -> None:
        self._reduce()
        self._device.compute.wait_stream(self._stream)


class DeepSpeedEngine(nn.Module):
    __module__ = "deepspeed.runtime.engine"
    device = torch.device("cpu")

    def __init__(self, module: nn.Module, optimizer: DeepSpeedZeroOptimizer) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)


Train = Callable[[int, bool], Recorded]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Record a training with a bucket size, with or without `overlap_comm`."""
    original = dist.all_reduce

    def record(size: int, overlaps: bool) -> Recorded:
        device = VirtualDevice()

        @functools.wraps(original)
        def timed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            duration = LATENCY_NS + NS_PER_ELEMENT * tensor.numel()
            device.transfer("all_reduce", "", duration)
            return original(tensor, *args, **kwargs)

        backend = SimpleNamespace(all_gather_function=None, reduce_scatter_function=None)
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_reduce", timed)
            patch.setitem(sys.modules, "deepspeed.comm.comm", SimpleNamespace(cdb=backend))
            model = TimedModel(device, blocks=4, forward_ns=1 * MS, host_ns=int(0.01 * MS))
            optimizer = DeepSpeedZeroOptimizer(device, model, size, overlaps=overlaps)
            return Recorded(device, DeepSpeedEngine(model, optimizer))

    return record


def as_run(recorded: Recorded, size: int, overlaps: bool) -> InMemoryRun:
    builder = RunBuilder(
        recorded.units, world_size=4, device_type="cuda", warmup_steps=0, sharder="zero2",
        observed={"reduce_bucket_size": str(size), "overlap_comm": str(overlaps)},
        process_groups=[ProcessGroup(index=0, name="all", ranks=[0, 1, 2, 3], role="shard")],
    )  # fmt: skip
    for name, handle in zip(recorded.units, recorded.sharder.units, strict=True):
        shapes = handle.parameter_shapes
        builder.unit(name, parameters=shapes, num_tensors=len(shapes), replicate_group=0)
    builder.rank(0).step(0, 0, 1)
    return replace(builder.build(), event_tables={0: recorded.events})


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_waits_for_reductions_are_the_time_in_which_compute_stands_still(
    train: Train, overlaps: bool
) -> None:
    recorded = train(FINE, overlaps)
    reductions = recorded.spans(EventKind.ALL_REDUCE)
    happened = recorded.happened("all_reduce")
    assert len(reductions) == len(happened) == len(recorded.units) == 4
    work = [*recorded.happened("forward"), *recorded.happened("backward")]
    begin, end = min(start for start, _ in work), max(end for _, end in happened)
    stands = end - begin - sum(end - start for start, end in work)
    waits = recorded.spans(EventKind.ALL_REDUCE_WAIT)
    assert sum(end - start for start, end in waits) == pytest.approx(stands, abs=int(0.1 * MS))
    assert stands > 2 * LATENCY_NS
    assert (waits == reductions) == (not overlaps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((FINE, False), (FINE, False)),
        ((FINE, False), (COARSE, False)),
        ((FINE, False), (FINE, True)),
        ((FINE, False), (COARSE, True)),
        ((FINE, True), (FINE, True)),
        ((FINE, True), (COARSE, True)),
        ((FINE, True), (FINE, False)),
    ],
)
def test_the_prediction_of_other_settings_is_the_step_of_the_device(
    train: Train, before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    work = replace(measure_buckets(as_run(train(*before), *before)), network=NETWORK)
    truth = measure_buckets(as_run(train(*after), *after))
    found = predict_buckets(work, after[0], overlaps=after[1])
    assert abs(found.replay_error) < 5e-3
    assert [each.num_tensors for each in found.rows()] == [len(each) for each in truth.recorded]
    assert found.predicted.step_time_ns == pytest.approx(truth.step_time_ns, rel=1e-2)
    assert found.predicted.exposed_ns == pytest.approx(truth.exposed_ns, rel=2e-2)
