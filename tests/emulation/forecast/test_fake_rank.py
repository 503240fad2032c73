"""Torch builds meshes, groups and optimizers on fake ranks. Pinned for torch 2.13."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _foreach_utils

from fsdp_inspect.emulation.forecast.fake_rank import fake_rank
from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.torch_api.apply import apply_plan
from fsdp_inspect.trace.plan import Plan, UnitPlan


def test_a_mesh_of_two_dimensions_is_made_and_sliced() -> None:
    with fake_rank(8, gpus_per_node=4, device_type="cuda"):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))

        assert dist.get_process_group_ranks(mesh["shard"].get_group()) == [0, 1, 2, 3]
        assert dist.get_process_group_ranks(mesh["replicate"].get_group()) == [0, 4]
        assert dist.get_world_size() == 8


def test_tensors_are_fake_inside_and_real_outside() -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        inside = torch.zeros(1 << 40)
        assert isinstance(inside, FakeTensor)

    assert not isinstance(torch.zeros(1), FakeTensor)
    assert not dist.is_initialized()


def test_optimizers_are_chosen_as_on_cuda_and_only_inside() -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        assert "cpu" in _foreach_utils._get_foreach_kernels_supported_devices()
    with fake_rank(2, gpus_per_node=2, device_type="cpu"):
        assert "cpu" not in _foreach_utils._get_foreach_kernels_supported_devices()
    assert "cpu" not in _foreach_utils._get_foreach_kernels_supported_devices()


def test_meshes_of_one_shape_are_told_apart_by_their_ranks_without_reading_fake_values() -> None:
    with fake_rank(8, gpus_per_node=8, device_type="cuda") as tensors:
        rows, columns = (
            init_device_mesh("cuda", shape, mesh_dim_names=("a", "b"))[name]
            for shape, name in (((2, 4), "b"), ((4, 2), "a"))
        )
        model = nn.Linear(8, 8)
        plan = Plan(world_size=8, mesh={"shard": 4}, units=(UnitPlan(modules=("",), mesh={}),))
        with pytest.raises(PlanError, match="with different ranks"):
            apply_plan(model, plan, [rows, columns])
        apply_plan(model, plan, [rows, rows])
        assert tensors.num_asked == 0
