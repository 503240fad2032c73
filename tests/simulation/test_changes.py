"""The plan that a change makes."""

import pytest

from fsdp_inspect.errors import PlanError
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.trace.plan import Plan, UnitPlan


def plan(num_blocks: int = 5, **fields: object) -> Plan:
    blocks = [UnitPlan(modules=(f"layers.{index}",)) for index in range(num_blocks)]
    ends = [UnitPlan(modules=("",)), UnitPlan(modules=("embed",))]
    head = UnitPlan(modules=("norm", "head"), reshard_after_forward=False)
    return Plan(units=(*ends, *blocks, head), **fields)  # type: ignore[arg-type]


def names(changed: Plan) -> list[str]:
    return [unit.name for unit in changed.units]


def test_nothing_named_changes_nothing():
    assert apply_changes(plan(), Changes()) == plan()


def test_every_n_groups_neighbouring_blocks_and_leaves_the_others():
    changed = apply_changes(plan(), Changes(wrap="every:2"))
    assert names(changed) == [
        "", "embed", "layers.0, layers.1", "layers.2, layers.3", "layers.4", "norm, head",
    ]  # fmt: skip


def test_block_takes_groups_apart_again():
    grouped = apply_changes(plan(), Changes(wrap="every:3"))
    assert apply_changes(grouped, Changes(wrap="block")) == plan()


@pytest.mark.parametrize("policy", ["block", "every:2", "split"])
def test_blocks_inside_other_units_cannot_be_grouped(policy: str):
    with pytest.raises(PlanError, match="no unit consists of numbered blocks"):
        apply_changes(plan(num_blocks=0), Changes(wrap=policy))


def test_root_leaves_one_unit():
    assert names(apply_changes(plan(), Changes(wrap="root"))) == [""]


def test_prefetch_of_units_that_are_gone_is_left_to_torch():
    named = plan(forward_prefetch={"layers.0": ("layers.1",)})
    assert apply_changes(named, Changes(wrap="every:2")).forward_prefetch == 0


def test_resharding_spares_the_root():
    changed = apply_changes(plan(), Changes(reshard_after_forward=False))
    assert {unit.reshard_after_forward for unit in changed.units if not unit.is_root} == {False}
    assert changed.unit("").reshard_after_forward is None


def test_dtypes_are_those_of_every_unit():
    changed = apply_changes(plan(), Changes(param_dtype="bfloat16", reduce_dtype="float32"))
    assert {(unit.param_dtype, unit.reduce_dtype) for unit in changed.units} == {
        ("bfloat16", "float32")
    }


def test_depths_replace_what_was_prefetched():
    changed = apply_changes(plan(forward_prefetch=3), Changes(forward_prefetch=1))
    assert (changed.forward_prefetch, changed.backward_prefetch) == (1, 0)


def test_more_ranks_shard_and_the_replicas_stay():
    hybrid = plan(world_size=8, mesh={"replicate": 2, "shard": 4})
    changed = apply_changes(hybrid, Changes(world_size=32))
    assert (changed.world_size, changed.mesh) == (32, {"replicate": 2, "shard": 16})


def test_a_world_that_the_replicas_do_not_divide_is_refused():
    hybrid = plan(world_size=8, mesh={"replicate": 2, "shard": 4})
    with pytest.raises(PlanError, match="Expected a multiple of 2"):
        apply_changes(hybrid, Changes(world_size=9))


@pytest.mark.parametrize("policy", ["every:0", "every", "blocks", "every:-1", ""])
def test_unknown_policies_are_refused_with_the_legal_ones(policy: str):
    with pytest.raises(PlanError, match="Expected `root`, `block`, `every:N`"):
        apply_changes(plan(), Changes(wrap=policy))


def test_splitting_blocks_makes_units_that_each_hold_a_matrix():
    names = ("layers.0.norm.weight", "layers.0.attention.weight", "layers.0.ffn.weight")
    shapes = {name: [4] if "norm" in name else [4, 4] for name in names}
    blocks = Plan(units=(UnitPlan(modules=("layers.0",)), UnitPlan(modules=("",))))
    split = apply_changes(blocks, Changes(wrap="split"), shapes)
    assert split.unit_names == ("layers.0.norm, layers.0.attention", "layers.0.ffn", "")


def test_blocks_without_recorded_parameters_cannot_be_split():
    with pytest.raises(PlanError, match="no block to split"):
        apply_changes(plan(), Changes(wrap="split"))


def test_replicas_divide_the_ranks_that_there_are():
    changed = apply_changes(plan(world_size=8, mesh={"shard": 8}), Changes(replicas=2))
    assert (changed.world_size, changed.mesh) == (8, {"replicate": 2, "shard": 4})
    assert apply_changes(changed, Changes(replicas=1)).mesh == {"shard": 8}


def test_replicas_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(PlanError, match="world size of 8 with 3 replicas"):
        apply_changes(plan(world_size=8, mesh={"shard": 8}), Changes(replicas=3))


def test_replicas_of_an_unknown_number_of_ranks_are_refused():
    with pytest.raises(PlanError, match="The number of ranks is unknown"):
        apply_changes(plan(), Changes(replicas=2))


def test_a_smaller_group_is_checked_against_the_new_mesh():
    changes = Changes(world_size=16, reshard_after_forward=16)
    changed = apply_changes(plan(world_size=8, mesh={"shard": 8}), changes)
    assert changed.unit("layers.0").reshard_after_forward == 16


def test_buffers_and_a_communicator_of_its_own_are_set_on_every_unit():
    changes = Changes(reduce_scatter_buffers=2, separate_reduce_scatter_group=True)
    changed = apply_changes(plan(), changes)
    assert {unit.reduce_scatter_max_input_buffers for unit in changed.units} == {2}
    assert all(unit.separate_reduce_scatter_group for unit in changed.units)


def test_accumulation_changes_in_what_is_named():
    accumulating = plan(accumulation={"microbatches": 4, "sync": "every"})
    changed = apply_changes(accumulating, Changes(accumulation_sync="last"))
    assert (changed.accumulation.microbatches, changed.accumulation.sync) == (4, "last")
    assert apply_changes(changed, Changes(microbatches=2)).accumulation.sync == "last"
