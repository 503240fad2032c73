import pytest
import torch

from fsdp_inspect.errors import ConfigError, FsdpInspectError, PlanError
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN, Plan
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.config import TrainerConfig
from instrumented_trainer.model import PRESETS, Decoder, ModelShape
from instrumented_trainer.parts import ModelParts, find_parts
from instrumented_trainer.sharding_plan import Machine, make_plan, parse_mesh

FOUR_CPUS = Machine(world_size=4, has_cuda=False)
FOUR_GPUS = Machine(world_size=4, has_cuda=True)
SHAPE = ModelShape(dim=32, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=64, vocab_size=64)
"""A block has 4 x 32 x 32 + 3 x 32 x 64 weights and 2 x 32 of norms: 10304, or 40.25 KiB in
float32. Its attention half has 4128, its feed-forward half 6176."""


def parts_of(shape: ModelShape) -> ModelParts:
    with torch.device("meta"):
        return find_parts(Decoder(shape))


PARTS = parts_of(SHAPE)


def plan_of(machine: Machine = FOUR_CPUS, parts: ModelParts = PARTS, **settings: object) -> Plan:
    return make_plan(check_settings(settings), parts, machine)


def blocks_of(plan: Plan) -> list[str]:
    return [name for name in plan.unit_names if name.startswith("layers")]


def test_blocks_embedding_and_head_are_units_as_in_torchtitan():
    plan = plan_of()
    assert plan.unit_names == (
        "",
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
        "norm, lm_head",
    )
    assert [unit.reshard_after_forward for unit in plan.units] == [None, *[True] * 5, False]


def test_tied_weights_stay_in_the_root():
    plan = plan_of(parts=parts_of(PRESETS["llama-1b"]))
    assert plan.unit_names == ("", *(f"layers.{number}" for number in range(16)))


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        ("every:3", ["layers.0, layers.1, layers.2", "layers.3"]),
        ("every:9", ["layers.0, layers.1, layers.2, layers.3"]),
        ("size:81KiB", ["layers.0, layers.1", "layers.2, layers.3"]),
        ("size:80KiB", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("layers.1; layers.2,layers.3", ["layers.1", "layers.2, layers.3"]),
        ("root", []),
    ],
)
def test_wrap_decides_which_blocks_go_together(wrap, expected):
    assert blocks_of(plan_of(wrap=wrap)) == expected


def test_blocks_above_the_size_are_split_without_leaving_norms_behind():
    plan = plan_of(wrap="size:30KiB")
    assert blocks_of(plan)[:2] == [
        "layers.0.attention_norm, layers.0.attention",
        "layers.0.ffn_norm, layers.0.ffn",
    ]
    shapes = {name: tuple(p.shape) for name, p in Decoder(SHAPE).named_parameters()}
    assert plan.find_risks(shapes, inputs_without_gradient={"tok_embeddings"}) == []


def test_sizes_count_bytes_in_the_dtype_that_is_gathered():
    assert len(blocks_of(plan_of(wrap="size:81KiB", param_dtype="bfloat16"))) == 1


@pytest.mark.parametrize(
    ("machine", "settings", "expected"),
    [
        (FOUR_CPUS, {}, (None, None)),
        (FOUR_GPUS, {}, ("bfloat16", "float32")),
        (FOUR_GPUS, {"param_dtype": "float32"}, (None, None)),
        (FOUR_CPUS, {"param_dtype": "float16"}, ("float16", "float32")),
        (FOUR_CPUS, {"reduce_dtype": "bfloat16"}, (None, "bfloat16")),
    ],
)
def test_dtypes_follow_the_machine_unless_said(machine, settings, expected):
    unit = plan_of(machine, **settings).unit("layers.0")
    assert (unit.param_dtype, unit.reduce_dtype) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", [None, True, True, False]),
        ("true", [True, True, True, True]),
        ("false", [False, False, False, False]),
        ("2", [2, 2, 2, 2]),
        ("true; layers.3=false", [True, True, False, True]),
        ("auto; layers.*=2; norm, lm_head=true", [None, 2, 2, True]),
        ("layers.0=false; (root)=true", [True, False, True, False]),
    ],
)
def test_reshard_after_forward_is_set_for_all_and_by_unit(text, expected):
    plan = plan_of(reshard_after_forward=text)
    names = ["", "layers.0", "layers.3", "norm, lm_head"]
    found = [plan.unit(name).reshard_after_forward for name in names]
    assert [(type(value), value) for value in found] == [(type(v), v) for v in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", {"shard": 4}),
        ("4", {"shard": 4}),
        ("2x2", {"replicate": 2, "shard": 2}),
        ("4 x 1", {"replicate": 4, "shard": 1}),
    ],
)
def test_a_mesh_is_replicas_times_shards(text, expected):
    assert parse_mesh(text, 4) == expected


def test_the_other_settings_reach_the_plan():
    plan = plan_of(
        forward_prefetch=1,
        backward_prefetch=2,
        microbatches=3,
        accumulation_sync="last",
        checkpointing="selective",
        reduce_scatter_buffers=2,
        separate_reduce_scatter_group=True,
        unshard_async_op=True,
        offload="cpu",
    )
    assert (plan.forward_prefetch, plan.backward_prefetch) == (1, 2)
    assert (plan.accumulation.microbatches, plan.accumulation.sync) == (3, "last")
    assert plan.checkpointing.selective == PARTS.blocks
    unit = plan.unit("layers.0")
    assert unit.reduce_scatter_max_input_buffers == 2
    assert unit.separate_reduce_scatter_group
    assert unit.unshard_async_op
    assert unit.offload == "cpu"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"wrap": "every:two"}, "wrap is 'every:two'. Expected a number of blocks"),
        ({"wrap": "size:8 potatoes"}, "Expected a size after 'size:', in bytes, KiB"),
        ({"wrap": "blocks"}, "'blocks' is neither a keyword nor a module of the model. Nearest"),
        ({"wrap": "layers"}, "contains 'layers', a list of modules, which is never called"),
        ({"wrap": "layer.*"}, "pattern 'layer.*' matches no module of the model. Nearest:"),
        (
            {"mesh": "2"},
            "mesh is '2', which has 2 ranks, but the world size is 4. Expected one of 4x1",
        ),
        ({"mesh": "two"}, "mesh is 'two'. Expected auto, N, or RxS"),
        ({"reshard_after_forward": "3"}, "does not fit 4 sharding ranks. Expected auto, true"),
        ({"reshard_after_forward": "layers.9=true"}, "contains an unknown unit 'layers.9'"),
        ({"offload": "cpu_pinned"}, "there is no GPU, so pinned memory is unsupported"),
        ({"plan": "absent.toml"}, "The plan 'absent.toml' cannot be read"),
        ({"plan": "x.toml", "mesh": "2x2"}, "--mesh and --plan both define the sharding"),
        (
            {"plan": "x.toml", "microbatches": 4, "accumulation_sync": "last"},
            "--microbatches, --accumulation-sync and --plan both define the sharding",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, complaint):
    with pytest.raises(FsdpInspectError) as refused:
        plan_of(**settings)
    assert complaint in str(refused.value)


def test_what_a_plan_decides_are_settings_of_the_trainer():
    assert set(DECIDED_BY_PLAN) <= set(TrainerConfig.model_fields)


def test_pinned_offload_is_for_machines_with_a_gpu():
    assert plan_of(FOUR_GPUS, offload="cpu_pinned").unit("layers.0").offload == "cpu_pinned"


def test_a_plan_file_takes_the_place_of_the_settings(tmp_path):
    path = tmp_path / "plan.toml"
    plan_of(wrap="every:2", mesh="2x2", checkpointing="full").dump(path)
    plan = plan_of(plan=str(path))
    assert plan == plan_of(wrap="every:2", mesh="2x2", checkpointing="full")


def test_a_plan_file_without_a_mesh_shards_over_all_ranks(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[[units]]\nmodules = ["layers.*"]\n[[units]]\nmodules = [""]\n')
    plan = plan_of(plan=str(path))
    assert (plan.world_size, plan.mesh) == (4, {"shard": 4})
    assert len(plan.units) == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("world_size = 8", "requires a world size of 8, but it is 4. Start 8 ranks"),
        ("mesh = { shard = 2 }", "has the mesh {'shard': 2}, but the world size is 4. Start 2"),
    ],
)
def test_a_plan_file_for_other_ranks_is_refused(tmp_path, text, complaint):
    path = tmp_path / "plan.toml"
    path.write_text(f'{text}\n[[units]]\nmodules = [""]\n')
    with pytest.raises(PlanError) as refused:
        plan_of(plan=str(path))
    assert complaint in str(refused.value)


def test_a_plan_file_that_shards_a_list_of_modules_is_refused(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[[units]]\nmodules = ["layers"]\n')
    with pytest.raises(ConfigError, match="a list of modules, which is never called"):
        plan_of(plan=str(path))
