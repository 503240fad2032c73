from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.modules import strip_wrappers
from fsdp_inspect.recording.torch_api.observe import observe_plan
from tests.torch_versions import needs_torch, release

pytestmark = pytest.mark.usefixtures("fake_world_of_4")


def test_a_plain_model_has_no_units(decoder):
    assert fsdp2.find_groups(decoder) == []


def test_units_come_in_the_order_of_the_modules_and_groups_once(decoder):
    fully_shard(decoder.layers[0])
    fully_shard(decoder.layers[1])
    fully_shard([decoder.norm, decoder.head])
    fully_shard(decoder)
    groups = fsdp2.find_groups(decoder)
    assert [group.name for group in groups] == ["", "layers.0", "layers.1", "norm, head"]
    assert [group.is_root for group in groups] == [True, False, False, False]
    assert groups[3].modules == (decoder.norm, decoder.head)


def test_unit_names_are_those_of_torch(decoder, tokens):
    fully_shard([decoder.norm, decoder.head])
    fully_shard(decoder)
    decoder(tokens)
    for handle in fsdp2.find_groups(decoder):
        assert handle.name == handle.group._module_fqn


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, at import
def test_wrapper_segments_are_left_out_of_names(decoder):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    decoder.layers[0] = checkpoint_wrapper(decoder.layers[0])
    decoder.layers[1] = torch.compile(decoder.layers[1])
    for layer in decoder.layers[:2]:
        fully_shard(layer)
    assert [group.name for group in fsdp2.find_groups(decoder)] == ["layers.0", "layers.1"]
    assert strip_wrappers("_orig_mod.layers.0._checkpoint_wrapped_module.ffn") == ("layers.0.ffn")


def test_a_model_without_a_unit_at_its_top_has_several_roots(decoder):
    for layer in decoder.layers:
        fully_shard(layer)
    assert [group.is_root for group in fsdp2.find_groups(decoder)] == [True] * 3


def test_a_call_without_own_parameters_is_a_state_but_no_unit():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert [handle.name for handle in fsdp2.find_states(model)] == ["", "0", "1"]
    assert [handle.name for handle in fsdp2.find_groups(model)] == ["0", "1"]


def test_several_groups_of_one_call_are_told_apart_by_mesh_size(two_meshes_in_one_unit):
    groups = fsdp2.find_groups(two_meshes_in_one_unit)
    assert [group.name for group in groups] == [" [pg=4]", " [pg=2]"]
    assert [(group.index, group.num_groups) for group in groups] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("asked", "found"), [(True, True), (False, False), (2, 2)])
def test_reshard_after_forward_is_found_as_it_was_asked(decoder, asked, found):
    fully_shard(decoder, reshard_after_forward=asked)
    assert fsdp2.find_groups(decoder)[0].reshard_after_forward == found


def test_an_automatic_root_is_undecided_until_the_first_forward(decoder, tokens):
    fully_shard(decoder)
    (group,) = fsdp2.find_groups(decoder)
    assert group.reshard_after_forward is None
    decoder(tokens)
    assert group.reshard_after_forward is False


def test_the_process_groups_of_a_unit_are_told_apart_by_their_work(decoder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    (group,) = fsdp2.find_groups(decoder)
    assert group.shard_group is mesh.get_group("shard")
    assert group.reduce_scatter_group is group.shard_group
    assert group.replicate_group is mesh.get_group("replicate")
    assert group.post_forward_group is None
    needs_torch("2.13", "has no separate group for reduce-scatters")
    fsdp2.separate_reduce_scatter_groups([decoder])
    assert group.reduce_scatter_group is not group.shard_group


def test_a_separate_group_that_torch_2_11_lacks_is_a_clear_error(decoder, monkeypatch):
    fully_shard(decoder)
    monkeypatch.delattr(fsdp2.FSDPParamGroup, "_set_separate_reduce_scatter_group", raising=False)
    with pytest.raises(PlanError, match=r"separate_reduce_scatter_group is True, which torch .*"):
        fsdp2.separate_reduce_scatter_groups([decoder])


def test_a_setting_that_torch_lacks_is_a_clear_error_unless_it_is_off(decoder):
    fully_shard(decoder)
    with pytest.raises(PlanError, match="newer_setting is 2, which torch"):
        fsdp2.configure(decoder, newer_setting=2)


def test_torch_2_11_waits_for_no_partly_run_unit(decoder):
    fully_shard(decoder)
    (group,) = fsdp2.find_groups(decoder)
    group.group.comm_ctx.reduce_scatter_states = []  # torch sets it at the first forward
    assert fsdp2.waits_for_partial_units(group.group)
    del group.group.comm_ctx.reduce_scatter_states
    assert not fsdp2.waits_for_partial_units(group.group)


def test_a_smaller_group_after_forward_has_its_own_process_group(decoder):
    fully_shard(decoder, reshard_after_forward=2)
    (group,) = fsdp2.find_groups(decoder)
    assert group.post_forward_group is not None
    assert group.post_forward_group.size() == 2


def test_offload_and_pinning_are_found(decoder):
    fully_shard(decoder, offload_policy=CPUOffloadPolicy(pin_memory=False))
    (group,) = fsdp2.find_groups(decoder)
    assert fsdp2.offloads_to_cpu(group.group)
    assert not fsdp2.pins_offloaded_memory(group.group)


def test_padded_shards_cover_the_original_sizes():
    model = nn.Linear(8, 5, bias=False)
    fully_shard(model)
    (group,) = fsdp2.find_groups(model)
    assert fsdp2.original_sizes(group.group) == [torch.Size([5, 8])]
    assert fsdp2.padded_shard_numels(group.group) == [16]
    assert fsdp2.sharded_parameters_of(group.group) == [model.weight]


def test_a_setting_reaches_its_own_call_and_none_inside(decoder):
    fully_shard(decoder.layers[0])
    fully_shard(decoder)
    fsdp2.configure(decoder, unshard_async_op=True)
    root, inner = fsdp2.find_groups(decoder)
    assert root.group.unshard_async_op
    assert not inner.group.unshard_async_op


def test_a_setting_that_an_older_torch_lacks_is_refused(decoder):
    fully_shard(decoder)
    (group,) = fsdp2.find_groups(decoder)
    needs_torch("2.13", "has no reduce_scatter_max_input_buffers")
    del group.group.reduce_scatter_max_input_buffers
    fsdp2.configure(decoder, reduce_scatter_max_input_buffers=1)
    assert fsdp2.reduce_scatter_max_input_buffers(group.group) == 1
    with pytest.raises(PlanError, match=r"is 2, which torch .* does not support. Install"):
        fsdp2.configure(decoder, reduce_scatter_max_input_buffers=2)


def test_the_whole_shape_of_every_parameter_is_known_before_and_after_a_forward(decoder, tokens):
    whole = {name: list(parameter.shape) for name, parameter in decoder.named_parameters()}
    fully_shard([decoder.norm, decoder.head])
    fully_shard(decoder)
    for _ in range(2):
        groups = fsdp2.find_groups(decoder)
        found = [fsdp2.parameter_shapes(group) for group in groups]
        assert {name: shape for shapes in found for name, shape in shapes.items()} == whole
        assert all(name.startswith(("norm", "head")) for name in found[1])
        decoder(tokens)


def test_without_a_reduce_dtype_the_version_of_torch_decides(decoder):
    fully_shard(decoder, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    (unit,) = fsdp2.find_groups(decoder)
    assert unit.param_dtype is torch.bfloat16
    assert unit.reduce_dtype is (torch.float32 if release() >= (2, 15) else torch.bfloat16)


def test_a_stated_reduce_dtype_is_that_of_the_unit(decoder):
    fully_shard(decoder, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float16))
    (unit,) = fsdp2.find_groups(decoder)
    assert unit.reduce_dtype is torch.float16


def test_a_dtype_chosen_by_parameter_counts_in_bytes_and_is_noted(decoder):
    needs_torch("2.15", "has one dtype for all parameters of a unit")
    policy: Any = MixedPrecisionPolicy
    chosen = {8: torch.float32}  # norms stay in float32
    fully_shard(
        decoder,
        mp_policy=policy(
            torch.bfloat16, param_dtype_override_fn=lambda each: chosen.get(each.numel())
        ),
    )
    (unit,) = fsdp2.find_groups(decoder)
    numels = [each.numel() for each in decoder.parameters()]
    assert fsdp2.gathered_bytes(unit.group, 4) == sum(
        numel * (4 if numel == 8 else 2) for numel in numels
    )
    (note,) = observe_plan(decoder).notes
    assert "several dtypes (bfloat16, float32)" in note


def test_a_tensor_that_gathers_its_own_dtype_has_the_size_of_what_it_gathers():
    """torchao's float8 weights have one byte per element, known after the first all-gather."""
    size = torch.Size([4, 2])
    common = {
        "padded_sharded_param_size": size,
        "mp_policy": MixedPrecisionPolicy(),
        "sharded_param": torch.empty(size),
    }
    plain = SimpleNamespace(_sharded_local_tensor=torch.empty(size), **common)
    float8 = SimpleNamespace(
        _sharded_local_tensor=SimpleNamespace(fsdp_pre_all_gather=None),
        all_gather_outputs=[],
        **common,
    )
    group = SimpleNamespace(fsdp_params=[plain, float8])

    assert fsdp2.gathered_bytes(group, 2) == 2 * 64
    float8.all_gather_outputs = [torch.empty(16, dtype=torch.float8_e4m3fn)]
    assert fsdp2.gathered_bytes(group, 2) == 64 + 16
