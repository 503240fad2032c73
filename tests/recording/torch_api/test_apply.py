import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.apply import apply_plan
from fsdp_inspect.recording.torch_api.observe import observe_plan
from fsdp_inspect.trace.plan import Fsdp1Settings, Plan, UnitPlan

BLOCKS = Plan.from_dict(
    {
        "units": [
            {"modules": ["embedding"]},
            {"modules": ["layers.*"]},
            {"modules": ["norm", "head"], "reshard_after_forward": False},
            {"modules": [""]},
        ]
    }
)


def names(model):
    return [handle.name for handle in fsdp2.find_states(model)]


def test_a_plan_becomes_fully_shard_calls(fake_world_of_4, decoder):
    resolved = apply_plan(decoder, BLOCKS)
    assert names(decoder) == ["", "embedding", "layers.0", "layers.1", "layers.2", "norm, head"]
    assert list(resolved.unit_names) == names(decoder)
    assert [group.reshard_after_forward for group in fsdp2.find_groups(decoder)] == [
        *[True] * 4,
        False,
    ]


def test_inner_modules_are_sharded_before_outer_ones_whatever_the_order(fake_world_of_4, decoder):
    apply_plan(
        decoder, Plan(units=tuple(UnitPlan(modules=(m,)) for m in ("", "layers.0", "layers.0.ffn")))
    )
    sizes = {g.name: len(g.group.fsdp_params) for g in fsdp2.find_groups(decoder)}
    assert sizes == {"": 16, "layers.0": 5, "layers.0.ffn": 1}


def test_the_mesh_of_the_plan_is_built(fake_world_of_4, decoder):
    apply_plan(decoder, BLOCKS.model_copy(update={"mesh": {"replicate": 2, "shard": 2}}))
    (group, *_) = fsdp2.find_groups(decoder)
    assert fsdp2.mesh_sizes(group.group) == {"replicate": 2, "shard": 2}


def test_a_mesh_of_the_caller_is_used(fake_world_of_4, decoder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    apply_plan(decoder, BLOCKS, mesh)
    assert fsdp2.find_groups(decoder)[0].shard_group is mesh.get_group()


def test_parameters_are_placed_as_the_caller_says(fake_world_of_4, decoder):
    apply_plan(decoder, BLOCKS, shard_placement_fn=lambda each: Shard(1) if each.ndim > 1 else None)
    assert decoder.head.weight.placements == (Shard(1),)
    assert decoder.norm.weight.placements == (Shard(0),)


def test_a_prefetch_depth_skips_a_root_without_parameters(fake_world_of_4, decoder):
    apply_plan(decoder, BLOCKS.model_copy(update={"forward_prefetch": 2}))
    by_name = {handle.name: handle for handle in fsdp2.find_states(decoder)}
    named = {id(handle.state): name for name, handle in by_name.items()}
    ahead = {
        name: [named[id(s)] for s in fsdp2.prefetched_states(handle.state, forward=True)]
        for name, handle in by_name.items()
    }
    assert ahead == {
        "": [],
        "embedding": ["layers.0", "layers.1"],
        "layers.0": ["layers.1", "layers.2"],
        "layers.1": ["layers.2", "norm, head"],
        "layers.2": ["norm, head"],
        "norm, head": [],
    }


def refusal(model, plan, mesh=None):
    with pytest.raises(PlanError) as refused:
        apply_plan(model, plan, mesh)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    return str(refused.value)


def test_a_plan_without_a_process_group_is_refused(decoder):
    assert not dist.is_initialized()
    assert "No process group is initialized" in refusal(decoder, BLOCKS)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"world_size": 8}, "requires 8 ranks, but 4 are running. Start 8 ranks"),
        ({"mesh": {"shard": 2}}, "mesh {'shard': 2} does not cover 4 ranks"),
        ({"units": (UnitPlan(modules=("layers",)),)}, "'layers', a ModuleList, which has no"),
        ({"units": (UnitPlan(modules=("layer.0",)),)}, "does not have. Nearest: 'layers.0'"),
        ({"units": (UnitPlan(modules=("",), reshard_after_forward=3),)}, "a divisor of 4"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(fake_world_of_4, decoder, changes, complaint):
    assert complaint in refusal(decoder, BLOCKS.model_copy(update=changes))


def test_a_mesh_of_another_shape_is_refused(fake_world_of_4, decoder):
    plan = BLOCKS.model_copy(update={"mesh": {"replicate": 2, "shard": 2}})
    text = refusal(decoder, plan, init_device_mesh("cpu", (4,)))
    assert "No given mesh has the shape of the plan, {'replicate': 2, 'shard': 2}" in text
    assert "the given shapes are (4,)" in text


def test_a_mesh_of_some_ranks_must_be_given(fake_world_of_4, decoder):
    plan = BLOCKS.model_copy(update={"mesh": {"shard": 2}})
    assert "does not cover 4 ranks" in refusal(decoder, plan, None)
    apply_plan(decoder, plan, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])


def test_two_meshes_of_one_shape_are_refused(fake_world_of_4, decoder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plan = BLOCKS.model_copy(update={"mesh": {"shard": 2}})
    assert "with different ranks" in refusal(decoder, plan, [mesh["a"], mesh["b"]])


def test_a_sharded_model_is_refused(fake_world_of_4, decoder):
    fully_shard(decoder.norm)
    with pytest.raises(PlanError, match="already sharded, first at 'norm'"):
        apply_plan(decoder, BLOCKS)


def test_risks_and_notes_are_warnings(fake_world_of_4, decoder):
    plan = Plan(
        units=(UnitPlan(modules=("embedding", "layers.0")), UnitPlan(modules=("",))),
        notes=("Something else.",),
    )
    with pytest.warns(UserWarning, match="gradient|Not applied") as caught:
        apply_plan(decoder, plan)
    texts = [str(warning.message) for warning in caught]
    assert any("begins with 'embedding', whose input needs no gradient" in text for text in texts)
    assert "Not applied, because a plan cannot express it: Something else." in texts
    assert {warning.filename for warning in caught} == {__file__}


def test_parameters_are_not_kept_for_the_update_of_the_optimizer(fake_world_of_4, decoder):
    plan = Plan(units=(UnitPlan(modules=("",), reshard_after_backward=False),))
    with pytest.warns(UserWarning, match="reshard_after_backward = false of 1 unit, such as"):
        apply_plan(decoder, plan)
    assert observe_plan(decoder).units[0].reshard_after_backward


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, at import
def test_checkpointing_the_model_itself_is_refused(fake_world_of_4, decoder):
    plan = Plan.from_dict({"units": [{"modules": [""]}], "checkpointing": {"full": [""]}})
    assert "Checkpointing contains the module ''" in refusal(decoder, plan)


def test_a_plan_of_fsdp1_is_not_applied(fake_world_of_4, decoder):
    plan = BLOCKS.model_copy(update={"units": BLOCKS.units[:2], "fsdp1": Fsdp1Settings()})
    with pytest.raises(PlanError, match=r"one of FSDP1.*Expected a plan of fully_shard"):
        apply_plan(decoder, plan)
