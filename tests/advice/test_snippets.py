"""Snippets for manual changes are valid Python and name the right modules."""

import ast

import pytest

from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.setting_findings import write_sharding
from fsdp_inspect.advice.snippets import write_snippet
from fsdp_inspect.trace.plan import Checkpointing, Plan, UnitPlan
from tests.builders import steady_run

NAMES = ("embedding", *(f"layers.{at}" for at in range(5)))
PLAN = Plan(units=tuple(UnitPlan(modules=(name,)) for name in (*NAMES, "")))


def kept(*names: str) -> Plan:
    units = tuple(
        unit.model_copy(update={"reshard_after_forward": False}) if unit.name in names else unit
        for unit in PLAN.units
    )
    return PLAN.model_copy(update={"units": units})


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        (Choice(reshard=False), "fully_shard(module, mesh=mesh, reshard_after_forward=False)"),
        (Choice(reduce_buffers=2), "model.set_reduce_scatter_max_input_buffers(2)"),
        (Choice(separate_reduce_group=True), "model.set_separate_reduce_scatter_group(True)"),
        (Choice(async_gathers=True), "model._set_unshard_async_op(True)"),
        (Choice(accumulation_sync="last"), "model.set_requires_gradient_sync(is_last_microbatch)"),
        (Choice(accumulation_sync="every"), "model.set_requires_gradient_sync(True)"),
        (
            Choice(keep_between_microbatches=True),
            "model.set_reshard_after_backward(is_last_microbatch)  # before each backward",
        ),
        (Choice(param_dtype="bfloat16"), "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
    ],
)
def test_a_setting_of_all_units_is_one_line(choice: Choice, line: str):
    snippet = write_snippet(choice, PLAN, PLAN)
    assert line in snippet
    ast.parse(snippet)


def test_prefetch_lists_the_units_in_the_order_of_the_pass():
    after = PLAN.with_values(forward_prefetch=2, backward_prefetch=1)
    forward = write_snippet(Choice(forward_prefetch=2), PLAN, after)
    backward = write_snippet(Choice(backward_prefetch=1), PLAN, after)
    for snippet in (forward, backward):
        ast.parse(snippet)
    assert 'f"layers.{at}" for at in range(0, 5)' in forward
    assert "set_modules_to_forward_prefetch(units[at + 1 : at + 1 + 2])" in forward
    assert 'f"layers.{at}" for at in range(4, -1, -1)' in backward


def test_prefetch_passes_over_units_without_parameters():
    after = PLAN.with_values(forward_prefetch=1)
    snippet = write_snippet(Choice(forward_prefetch=1), PLAN, after, without=[""])
    assert snippet.startswith("names = ['embedding', *(")
    assert "''" not in snippet


def test_kept_units_are_named():
    snippet = write_snippet(Choice(num_kept=2), PLAN, kept("layers.3", "layers.4"))
    assert "for name in ['layers.3', 'layers.4']:" in snippet
    assert "set_reshard_after_forward(False, recurse=False)" in snippet
    ast.parse(snippet)


def test_new_units_are_sharded_inner_ones_first_and_the_rest_is_counted():
    merged = PLAN.merge(["layers.0", "layers.1"])
    snippet = write_snippet(Choice(grouping="merge"), PLAN, merged)
    expected = "fully_shard([model.get_submodule(name) for name in ['layers.0', 'layers.1']]"
    assert expected in snippet
    ast.parse(snippet)
    alone = Plan(units=(UnitPlan(modules=("",)),))
    many = write_snippet(Choice(grouping="each"), alone, PLAN)
    assert "# and 2 similar calls: the plan file lists them" in many


def test_units_that_only_go_are_named():
    whole = PLAN.model_copy(update={"units": (UnitPlan(modules=("",)),)})
    snippet = write_snippet(Choice(grouping="the whole model as one unit"), PLAN, whole)
    assert "remove your calls for these modules" in snippet
    assert "names = ['embedding', *(f\"layers.{at}\" for at in range(0, 5))]" in snippet
    ast.parse(snippet)


def test_no_change_has_no_lines():
    assert write_snippet(Choice(), PLAN, PLAN) == ""


def test_checkpointed_modules_are_wrapped_before_they_are_sharded():
    blocks = tuple(f"layers.{at}" for at in range(5))
    after = PLAN.model_copy(update={"checkpointing": Checkpointing(full=blocks)})
    snippet = write_snippet(Choice(checkpointing="full"), PLAN, after)
    assert 'f"layers.{at}" for at in range(0, 5)' in snippet
    assert "checkpoint_wrapper(getattr(module, child))" in snippet
    ast.parse(snippet)


def test_the_calls_that_shard_a_model_use_no_name_but_the_model() -> None:
    parameters = {f"model.layers.{at}.mlp.weight": [4, 4] for at in range(3)}
    units = [steady_run().manifest.units[0].model_copy(update={"parameters": parameters})]
    manifest = steady_run().manifest.model_copy(update={"units": units})
    snippet = write_sharding(manifest)
    assert "for block in model.get_submodule('model.layers'):" in snippet
    names = {node.id for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Name)}
    assert names == {"model", "block", "fully_shard"}
