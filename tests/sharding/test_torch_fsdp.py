import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.sharding import torch_fsdp


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def test_the_private_attributes_are_those_of_the_pinned_torch():
    assert torch.__version__.split("+")[0] == "2.13.0", "read torch_fsdp.py against this torch"


def test_a_plain_model_has_no_units():
    assert torch_fsdp.find_groups(Decoder()) == []


def test_units_come_in_the_order_of_the_modules_and_groups_once(fake_world_of_4):
    model = Decoder()
    fully_shard(model.layers[0])
    fully_shard(model.layers[1])
    fully_shard([model.norm, model.head])
    fully_shard(model)
    groups = torch_fsdp.find_groups(model)
    assert [group.name for group in groups] == ["", "layers.0", "layers.1", "norm, head"]
    assert [group.is_root for group in groups] == [True, False, False, False]
    assert groups[3].modules == (model.norm, model.head)


def test_unit_names_are_those_of_torch(fake_world_of_4):
    model = Decoder()
    fully_shard([model.norm, model.head])
    fully_shard(model)
    model(torch.zeros(1, 3, dtype=torch.long))
    for handle in torch_fsdp.find_groups(model):
        assert handle.name == handle.group._module_fqn


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, at import
def test_wrapper_segments_are_left_out_of_names(fake_world_of_4):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Decoder()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1].compile()
    for layer in model.layers:
        fully_shard(layer)
    assert [group.name for group in torch_fsdp.find_groups(model)] == ["layers.0", "layers.1"]
    assert torch_fsdp.strip_wrappers("_orig_mod.layers.0._checkpoint_wrapped_module.ffn") == (
        "layers.0.ffn"
    )


def test_a_model_without_a_unit_at_its_top_has_several_roots(fake_world_of_4):
    model = Decoder()
    for layer in model.layers:
        fully_shard(layer)
    assert [group.is_root for group in torch_fsdp.find_groups(model)] == [True, True]


def test_a_call_without_own_parameters_is_a_state_but_no_unit(fake_world_of_4):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert [handle.name for handle in torch_fsdp.find_states(model)] == ["", "0", "1"]
    assert [handle.name for handle in torch_fsdp.find_groups(model)] == ["0", "1"]


def test_several_groups_of_one_call_are_told_apart_by_mesh_size(fake_world_of_4):
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    experts = FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], 0)
    dense = FSDPMeshInfo(init_device_mesh("cpu", (4,)), 0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    expert = model[1].weight
    fully_shard(
        model,
        mesh=dense.mesh,
        shard_placement_fn=lambda param: ShardPlacementResult(
            Shard(0), experts if param is expert else dense
        ),
    )
    groups = torch_fsdp.find_groups(model)
    assert [group.name for group in groups] == [" [pg=4]", " [pg=2]"]
    assert [(group.index, group.num_groups) for group in groups] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("asked", "found"), [(True, True), (False, False), (2, 2)])
def test_reshard_after_forward_is_found_as_it_was_asked(fake_world_of_4, asked, found):
    model = Decoder()
    fully_shard(model, reshard_after_forward=asked)
    assert torch_fsdp.find_groups(model)[0].reshard_after_forward == found


def test_an_automatic_root_is_undecided_until_the_first_forward(fake_world_of_4):
    model = Decoder()
    fully_shard(model)
    (group,) = torch_fsdp.find_groups(model)
    assert group.reshard_after_forward is None
    model(torch.zeros(1, 3, dtype=torch.long))
    assert group.reshard_after_forward is False
