import pytest

from fsdp_inspect.errors import PlanError
from fsdp_inspect.trace.plan import Accumulation, Checkpointing, Plan, UnitPlan
from fsdp_inspect.trace.plan_text import parse

LLAMA = Plan(
    units=(
        UnitPlan(modules=("",), param_dtype="bfloat16"),
        UnitPlan(modules=("tok_embeddings",), param_dtype="bfloat16"),
        *(UnitPlan(modules=(f"layers.{i}",), param_dtype="bfloat16") for i in range(32)),
        UnitPlan(modules=("norm", "lm_head"), param_dtype="bfloat16", reshard_after_forward=False),
    ),
    world_size=8,
    mesh={"replicate": 2, "shard": 4},
    forward_prefetch=1,
    backward_prefetch={"layers.1": ("layers.0",)},
    accumulation=Accumulation(microbatches=4, sync="last"),
    checkpointing=Checkpointing(full=tuple(f"layers.{i}" for i in range(32))),
)

LLAMA_TEXT = """\
# How a model is sharded: each [[units]] entry is one fully_shard call, or one for each number in
# a range. Apply it with fsdp_inspect.apply_plan(model, Plan.load(FILE)).
version = 1
world_size = 8
mesh = { replicate = 2, shard = 4 }
forward_prefetch = 1

[accumulation]
microbatches = 4
sync = "last"

[checkpointing]
full = ["layers.{0..31}"]

[backward_prefetch]
"layers.1" = ["layers.0"]

[every_unit]
param_dtype = "bfloat16"

[[units]]
modules = [""]

[[units]]
modules = ["tok_embeddings"]

[[units]]
modules = ["layers.{0..31}"]

[[units]]
modules = ["norm", "lm_head"]
reshard_after_forward = false
"""


def test_a_plan_of_32_blocks_fits_on_a_screen():
    assert LLAMA.to_toml() == LLAMA_TEXT


def test_the_text_reads_as_that_plan():
    assert Plan.from_toml(LLAMA_TEXT) == LLAMA


def test_split_blocks_are_written_as_two_entries_that_go_together():
    parts = [("attention_norm", "attention"), ("ffn_norm", "ffn")]
    plan = Plan(
        units=tuple(
            UnitPlan(modules=tuple(f"layers.{i}.{part}" for part in pair))
            for i in range(4)
            for pair in parts
        )
    )
    text = plan.to_toml()
    assert '["layers.{0..3}.attention_norm", "layers.{0..3}.attention"]' in text
    assert text.count("modules = ") == 2
    assert Plan.from_toml(text) == plan


def test_two_stacks_of_equal_length_stay_apart():
    plan = Plan(
        units=tuple(
            UnitPlan(modules=(f"{stack}.layers.{i}",))
            for stack in ("encoder", "decoder")
            for i in range(3)
        )
    )
    assert plan.to_toml().count("{0..2}") == 2
    assert Plan.from_toml(plan.to_toml()) == plan


def test_none_is_written_as_auto_where_other_units_have_a_value():
    units = [UnitPlan(modules=(name,), reduce_dtype="float32") for name in ("a", "b")]
    text = Plan(units=(*units, UnitPlan(modules=("c",)))).to_toml()
    assert 'modules = ["c"]\nreduce_dtype = "auto"' in text
    assert Plan.from_toml(text).unit("c").reduce_dtype is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("version = 1", "The plan has no units. Expected at least one"),
        ("units = 3", "The plan has no units. Expected at least one"),
        ("every_unit = 3\n[[units]]\nmodules = ['a']", r"\[every_unit\] is 3. Expected settings"),
        ("[[units]]\nmodules = ['a.{1..2}', 'b']", "mixes ranges. Expected the same range"),
        ("[[units]]\nmodules = ['a.{2..1}']", "Invalid range in 'a.{2..1}'. Expected one range"),
        ("[[units]]\nmodules = ['a.{x}']", "Invalid range in 'a.{x}'. Expected one range"),
    ],
)
def test_text_that_cannot_be_spelled_out_is_refused(text, complaint):
    with pytest.raises(PlanError, match=complaint):
        parse(text)
