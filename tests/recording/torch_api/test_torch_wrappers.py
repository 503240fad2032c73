"""The private state of FSDP1 and DDP that `torch_api` read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect.recording.dispatcher_kernels import OPERATOR, observe, observe_all_reduces
from fsdp_inspect.recording.torch_api.ddp import find_buckets, has_final_buckets
from fsdp_inspect.recording.torch_api.fsdp1 import HOOKED_FUNCTIONS, find_flat_handles


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


def test_torch_has_the_functions_that_the_recorder_replaces() -> None:
    assert all(callable(getattr(_runtime_utils, name)) for name in HOOKED_FUNCTIONS)
    for name in ("pre_unshard", "_all_gather_flat_param", "post_unshard"):
        assert callable(getattr(FlatParamHandle, name))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_one_rank_of_fsdp1_is_replicated() -> None:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    [handle] = find_flat_handles(model)
    assert (handle.name, handle.is_root, handle.strategy) == ("", True, "NO_SHARD")
    assert (handle.is_replicated, handle.shard_group) == (True, None)
    assert (handle.shard_numel, handle.reduced_numel) == (3 * 272, 3 * 272)


def test_buckets_are_assigned_again_after_the_first_step() -> None:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    before = find_buckets("", model)
    assert [bucket.names[0] for bucket in before] == ["0.weight"]
    assert not has_final_buckets(model)
    for _ in range(2):
        model(torch.ones(1, 16)).sum().backward()
    after = find_buckets("", model)
    assert [bucket.fqns for bucket in after] == [("2",), ("1",), ("0",)]
    assert [bucket.num_bytes for bucket in after] == [272 * 4] * 3
    assert has_final_buckets(model)


def test_buckets_with_unused_parameters_stay_as_assigned() -> None:
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    assert has_final_buckets(model)


def test_finding_buckets_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(make_model())
    buffers = [type(each.buffer()) for each in model.reducer._get_zeros_like_grad_buckets()]
    assert buffers == [torch.Tensor]
    [bucket] = find_buckets("", model)
    assert all(type(parameter) is nn.Parameter for parameter in bucket.parameters)


def test_two_observers_see_each_all_reduce_and_leave_torch_s_kernel() -> None:
    seen = []

    def observe(name: str):
        def observer(tensors, group, issue):
            seen.append((name, tensors[0].numel(), group.size()))
            return issue()[0]

        return observer

    first = observe_all_reduces(observe("first"))
    second = observe_all_reduces(observe("second"))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    first()
    dist.all_reduce(tensor)
    second()
    dist.all_reduce(tensor)
    assert sorted(seen) == [("first", 3, 1), ("second", 3, 1), ("second", 3, 1)]
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_an_innermost_observer_is_called_by_those_before_it() -> None:
    seen: list[str] = []

    def named(name: str) -> Any:
        def observer(arguments: tuple[Any, ...], issue: Any) -> Any:
            seen.append(name)
            return issue()

        return observer

    ends = [
        observe(OPERATOR, named("outer")),
        observe(OPERATOR, named("inner"), is_innermost=True),
    ]
    dist.all_reduce(torch.ones(1))
    for end in ends:
        end()
    assert seen == ["outer", "inner"]
