"""A script runs as rank 0 of emulated ranks."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_inspect.emulation.network import parse_specification
from fsdp_inspect.emulation.process import Emulation, active_emulation, emulate
from fsdp_inspect.errors import EmulationError
from fsdp_inspect.trace.codes import EventKind

FAST = parse_specification("world_size=8,gpus_per_node=4,bandwidth=9GB/s,inter_bandwidth=1GB/s")
SLOW = parse_specification("world_size=8,bandwidth=1GB/s,latency=500ms")
"""A transfer lasts longer than the delay of the next line on a busy machine."""


@pytest.fixture
def emulation() -> Iterator[Emulation]:
    with emulate(FAST) as emulation:
        dist.init_process_group("nccl", init_method="env://")
        yield emulation
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_process_is_rank_0_whatever_backend_it_asks_for(emulation: Emulation):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "fake")
    assert {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
    }
    assert os.environ["LOCAL_WORLD_SIZE"] == "4"
    assert active_emulation() is emulation


def test_meshes_and_groups_can_be_made(emulation: Emulation):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))

    assert mesh["shard"].size() == 4
    assert dist.new_group([0, 1, 2], backend="gloo").size() == 3


def test_a_mesh_alone_starts_the_process_group():
    with emulate(FAST):
        assert init_device_mesh("cpu", (8,)).size() == 8
        assert dist.get_backend() == "fake"
        dist.destroy_process_group()


def test_values_are_those_of_rank_0(emulation: Emulation):
    own, gathered = torch.arange(2.0), torch.empty(16)
    dist.all_gather_single(gathered, own)
    total = torch.ones(1)
    dist.all_reduce(total)
    objects: list[object] = [None] * 8
    dist.all_gather_object(objects, {"loss": 1})

    assert gathered.tolist() == [0.0, 1.0] * 8
    assert total.item() == 1.0
    assert objects == [{"loss": 1}] * 8


def test_a_collective_takes_its_time(emulation: Emulation):
    dist.all_reduce(torch.ones(250_000))
    transfer = emulation.take_transfer()

    assert transfer is not None
    assert transfer.kind == EventKind.ALL_REDUCE
    assert transfer.end_ns - transfer.start_ns == 20_000 + 10**6 * 2 * 7 / 8 / 4
    assert emulation.take_transfer() is None


def test_an_asynchronous_collective_is_waited_for_through_its_work():
    with emulate(SLOW) as emulation:
        dist.init_process_group()
        work = dist.all_reduce(torch.ones(1), async_op=True)
        transfer = emulation.take_transfer()
        assert transfer is not None
        assert not work.is_completed()
        assert transfer.need_ns == -1
        work.wait()
        assert work.is_completed()
        dist.destroy_process_group()

    assert transfer.issue_ns < transfer.need_ns < transfer.end_ns


def test_a_functional_collective_is_waited_for_by_who_uses_its_result(emulation: Emulation):
    result = functional.all_reduce(torch.ones(250_000), "sum", dist.group.WORLD)
    transfer = emulation.take_transfer()
    assert transfer is not None
    assert transfer.need_ns == -1
    assert float(result.sum()) == 250_000

    assert transfer.need_ns > transfer.issue_ns


def test_collectives_of_objects_take_no_time(emulation: Emulation):
    dist.broadcast_object_list([1], 0)

    assert emulation.take_transfer() is None


@pytest.mark.parametrize("function", ["send", "recv", "isend", "irecv"])
def test_nothing_can_be_sent_to_one_rank(emulation: Emulation, function: str):
    with pytest.raises(EmulationError, match=rf"{function} is unsupported .* pipelines cannot"):
        getattr(dist, function)(torch.ones(1), 1)


def test_another_world_size_is_refused():
    with (
        emulate(FAST),
        pytest.raises(EmulationError, match=r"world size of 4, but 8 .* Emulate world_size=4"),
    ):
        dist.init_process_group("gloo", world_size=4, rank=0)


def test_one_of_several_real_ranks_cannot_emulate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(EmulationError, match=r"one of 2 real ranks.*not with torchrun"),
        emulate(FAST),
    ):
        pass


def test_torch_is_left_as_it_was():
    functions = [dist.all_reduce, dist.init_process_group, functional.wait_tensor]
    methods = dict(vars(FSDPParamGroup))
    environment = dict(os.environ)
    with emulate(FAST):
        assert dist.all_reduce is not functions[0]

    assert [dist.all_reduce, dist.init_process_group, functional.wait_tensor] == functions
    assert dict(vars(FSDPParamGroup)) == methods
    assert dict(os.environ) == environment
    assert active_emulation() is None
