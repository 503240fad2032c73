import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.torch_api.apply import apply_plan
from fsdp_inspect.recording.torch_api.observe import observe_plan
from fsdp_inspect.trace.plan import Plan
from tests.torch_versions import apply_or_skip

from .conftest import Decoder

pytestmark = [
    pytest.mark.usefixtures("fake_world_of_4"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # torch's own, at import
]

ROOT = {"modules": [""]}
BLOCKS = [
    ROOT,
    {"modules": ["embedding"]},
    {"modules": ["layers.*"]},
    {"modules": ["norm", "head"], "reshard_after_forward": False},
]
PLANS = {
    "blocks": {"units": BLOCKS},
    "root": {"units": [ROOT]},
    "no_root": {"units": [{"modules": ["layers.0"]}, {"modules": ["layers.2"]}]},
    "split": {
        "units": [
            ROOT,
            {"modules": ["layers.*.attention_norm", "layers.*.attention"]},
            {"modules": ["layers.*.ffn_norm", "layers.*.ffn"]},
        ]
    },
    "merged": {"units": [ROOT, {"modules": ["layers.0", "layers.1"]}]},
    "hsdp": {"units": BLOCKS, "mesh": {"replicate": 2, "shard": 2}},
    "replicated": {"units": BLOCKS[:3], "mesh": {"replicate": 4}},
    "some_replicated": {"units": [ROOT, {"modules": ["layers.1"], "mesh": {"replicate": 4}}]},
    "half_mesh": {"units": [{**ROOT, "reshard_after_forward": 2}]},
    "prefetch": {"units": BLOCKS, "forward_prefetch": 2, "backward_prefetch": 1},
    "prefetch_lists": {
        "units": BLOCKS,
        "forward_prefetch": {"embedding": ["layers.0", "norm, head"], "layers.1": ["layers.0"]},
    },
    "checkpointing": {
        "units": BLOCKS,
        "checkpointing": {"full": ["layers.0"], "selective": ["layers.1", "layers.2.ffn"]},
    },
    "settings": {
        "units": [
            ROOT,
            {
                "modules": ["layers.*"],
                "reshard_after_forward": True,
                "unshard_in_backward": False,
                "unshard_async_op": True,
                "reduce_scatter_max_input_buffers": 2,
                "separate_reduce_scatter_group": True,
                "param_dtype": "bfloat16",
                "reduce_dtype": "float32",
                "output_dtype": "float32",
                "cast_forward_inputs": False,
                "offload": "cpu",
            },
        ]
    },
}


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS.keys())
def test_a_plan_observed_and_applied_to_a_fresh_copy_is_observed_again(fields):
    first, second = Decoder(), Decoder()
    apply_or_skip(first, Plan.from_dict(fields))
    observed = observe_plan(first)
    apply_plan(second, observed)
    assert observe_plan(second) == observed
    assert observed.notes == ()


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS.keys())
def test_the_observed_plan_says_what_the_applied_one_said(fields):
    model = Decoder()
    resolved = apply_or_skip(model, Plan.from_dict(fields)).to_dict()
    observed = observe_plan(model).to_dict()
    for before, after in zip(resolved.pop("units"), observed.pop("units"), strict=True):
        if before["reshard_after_forward"] is None and after["modules"] != [""]:
            before["reshard_after_forward"] = after["reshard_after_forward"]
        assert after == before
    resolved |= {"world_size": 4, "mesh": resolved["mesh"] or {"shard": 4}}
    assert observed == resolved


def test_the_first_forward_changes_no_observation(decoder, tokens):
    apply_plan(decoder, Plan.from_dict({"units": BLOCKS}))
    before = observe_plan(decoder)
    decoder(tokens)
    assert observe_plan(decoder) == before


def test_a_plain_model_has_no_plan():
    with pytest.raises(PlanError, match="Decoder has no plan: fully_shard was never called"):
        observe_plan(Decoder())


def test_ignored_parameters_are_noted(decoder):
    fully_shard(decoder, ignored_params={decoder.head.weight})
    (note,) = observe_plan(decoder).notes
    assert note == "Parameters in units that fully_shard ignores: head.weight."


def test_tied_weights_are_not_taken_for_ignored(decoder):
    decoder.head.weight = decoder.embedding.weight
    fully_shard(decoder)
    assert observe_plan(decoder).notes == ()


def test_sharding_on_another_dimension_is_noted():
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    assert observe_plan(model).notes == ("Unit (root) shards parameters on dimension 1, not 0.",)


def test_several_meshes_are_noted(two_meshes_in_one_unit):
    (note,) = observe_plan(two_meshes_in_one_unit).notes
    assert "Unit (root) has 2 groups on different meshes" in note


def test_a_layer_and_its_sharded_checkpoint_wrapper_are_one_unit(decoder):
    for name, layer in list(decoder.layers.named_children()):
        fully_shard(layer)
        setattr(decoder.layers, name, fully_shard(checkpoint_wrapper(layer)))
    fully_shard(decoder)
    plan = observe_plan(decoder)
    layers = [name for name, _ in decoder.layers.named_children()]
    assert plan.unit_names == ("", *(f"layers.{name}" for name in layers))
    assert plan.checkpointing.full == tuple(plan.unit_names[1:])
    fresh = Decoder()
    apply_plan(fresh, plan)
    assert observe_plan(fresh) == plan
