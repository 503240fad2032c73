"""Test that a changed setting is called a cause only if it explains the bytes."""

from typing import Any

import pytest

from fsdp_inspect.comparison.causes import find_causes
from fsdp_inspect.comparison.increases import Increase
from fsdp_inspect.trace.run import RunManifest
from tests.builders import RunBuilder

ACTIVATIONS = (Increase("activation", ("layers.0",), 10, 20),)
UNSHARDED = (Increase("unsharded_parameter", ("layers.0",), 0, 300),)
REDUCED = (Increase("reduce_scatter_buffer", ("layers.0",), 0, 300),)
GRADIENTS = (Increase("unsharded_gradient", ("layers.0",), 0, 300),)
OF_LOSS = (Increase("activation", ("(no unit)",), 10, 20),)
LAYERS = ("layers.0", "layers.1", "layers.2")
STATES = (Increase("optimizer_state", ("layers.0",), 100, 150),)


def manifest(unit: dict[str, Any] | None = None, **settings: Any) -> RunManifest:
    builder = RunBuilder(LAYERS, world_size=4, **settings)
    for fqn in builder.units:
        builder.unit(fqn, **{"unsharded_bytes": 100, **(unit or {})})
    builder.rank(0)
    return builder.build().manifest


def causes(
    before: RunManifest,
    after: RunManifest,
    growth: tuple[Increase, ...] = ACTIVATIONS,
    *,
    of_memory: bool = True,
) -> list[str]:
    return list(
        find_causes(
            before, after, growth, of_memory=of_memory, longer=None if of_memory else frozenset()
        )
    )


KEPT, FREED, PARTLY = ({"reshard_after_forward": value} for value in (False, True, 2))


@pytest.mark.parametrize(
    ("before", "after", "of_memory", "words"),
    [
        (FREED, KEPT, True, "`layers.*` have reshard_after_forward=False: +3 unsharded blocks"),
        (FREED, PARTLY, True, "have reshard_after_forward=2: 3 blocks sharded over only 2 ranks"),
        (KEPT, FREED, False, "have reshard_after_forward=True: backward gathers them again"),
        (KEPT, PARTLY, False, "have reshard_after_forward=2: backward gathers them again"),
    ],
    ids=["kept", "kept in part", "gathered again", "gathered again in part"],
)
def test_resharding_is_a_cause_of_what_it_costs(
    before: dict[str, Any], after: dict[str, Any], of_memory: bool, words: str
) -> None:
    found = causes(manifest(before), manifest(after), UNSHARDED, of_memory=of_memory)

    assert words in found[0]


def test_what_frees_memory_is_no_cause_of_more_of_it() -> None:
    assert causes(manifest(KEPT), manifest(FREED), UNSHARDED) == []


def test_a_setting_is_no_cause_of_bytes_that_it_cannot_raise() -> None:
    assert causes(manifest(FREED), manifest(KEPT), ACTIVATIONS) == []


def test_a_setting_is_no_cause_of_more_bytes_than_it_adds() -> None:
    larger = (Increase("unsharded_parameter", ("layers.0",), 0, 600),)
    assert causes(manifest(FREED), manifest(KEPT), larger) == []


def test_recomputation_that_ends_explains_activations_before_dropout_does() -> None:
    before = manifest(observed={"dropout": "none", "recomputation": "3 forwards a backward"})
    after = manifest(observed={"dropout": "0.1 in 3 modules", "recomputation": "none"})
    assert causes(before, after) == ["recomputation is none instead of 3 forwards a backward"]
    assert causes(after, before) == []


def test_a_narrower_dtype_is_no_cause_of_more_memory() -> None:
    wide, narrow = ({"reduce_dtype": dtype} for dtype in ("float32", "bfloat16"))

    (wider,) = causes(manifest(narrow), manifest(wide), REDUCED)
    assert "have reduce_dtype=float32 instead of bfloat16" in wider
    assert causes(manifest(wide), manifest(narrow), REDUCED) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "growth"),
    [
        ("dropout", "none", "0.1 in 3 modules", ACTIVATIONS),
        ("attention", "sdpa", "eager", ACTIVATIONS),
        ("recomputation", "3 forwards a backward", "none", ACTIVATIONS),
        ("recomputation", "3 forwards a backward", "1 forward a backward", ACTIVATIONS),
        ("gradient_sync", "every microbatch", "some microbatches", GRADIENTS),
        ("backwards", "1 a step", "3 a step", GRADIENTS),
        ("loss_dtype", "bfloat16", "float32", OF_LOSS),
        ("optimizer", "AdamW(amsgrad=False)", "SGD(momentum=0.9)", STATES),
    ],
)
def test_an_observed_setting_is_the_cause_of_the_categories_that_it_raises(
    name: str, old: str, new: str, growth: tuple[Increase, ...]
) -> None:
    before, after = (manifest(observed={name: value}) for value in (old, new))

    assert causes(before, after, growth) == [f"{name} is {new} instead of {old}"]
    assert causes(before, after, UNSHARDED) == []


@pytest.mark.parametrize(
    ("new", "bytes_after", "words"),
    [
        ("5 x 32 int64", 125, "the batch grew: the model receives 5 x 32 int64 instead of 4 x 32"),
        ("4 x 40 int64", 156, "the inputs grew: the model receives 4 x 40 int64 instead of 4 x 32"),
        ("5 x 32 int64", 160, None),
        ("3 x 32 int64", 125, None),
    ],
    ids=["batch", "length", "too little", "smaller"],
)
def test_larger_inputs_are_a_cause_of_as_many_bytes_as_they_add(
    new: str, bytes_after: int, words: str | None
) -> None:
    before, after = (manifest(observed={"inputs": text}) for text in ("4 x 32 int64", new))
    growth = (Increase("activation", ("layers.0",), 100, bytes_after),)

    found = causes(before, after, growth)
    assert len(found) == (words is not None)
    assert all(words in cause for cause in found if words)
    assert causes(before, after, UNSHARDED) == []


def test_a_setting_of_the_batch_is_named_rather_than_the_inputs() -> None:
    before, after = (
        manifest(observed={"inputs": f"{rows} x 32 int64"}, config={"batch_size": rows})
        for rows in (4, 5)
    )
    growth = (Increase("activation", ("layers.0",), 100, 125),)

    assert causes(before, after, growth) == ["batch_size is 5 instead of 4"]
    assert causes(before, after, (), of_memory=False) == ["batch_size is 5 instead of 4"]


def test_another_setting_of_the_same_optimizer_is_named_alone() -> None:
    before, after = (
        manifest(observed={"optimizer": f"AdamW(amsgrad={on}, fused=None)"}) for on in (False, True)
    )

    assert causes(before, after, STATES) == ["optimizer is AdamW with amsgrad=True"]


def test_the_same_dropout_with_another_probability_is_no_cause() -> None:
    low, high = (manifest(observed={"dropout": f"{p} in 3 modules"}) for p in (0.1, 0.2))

    assert causes(low, high) == []


def test_the_dtype_of_the_loss_is_no_cause_in_the_first_units() -> None:
    before, after = (manifest(observed={"loss_dtype": dtype}) for dtype in ("bfloat16", "float32"))

    assert causes(before, after, ACTIVATIONS) == []


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_prefetch_is_a_cause_in_its_own_phase_only(phase: str) -> None:
    before, after = (
        manifest(plan={"forward_prefetch": depth, "backward_prefetch": depth}) for depth in (1, 2)
    )

    found = find_causes(before, after, UNSHARDED, of_memory=True, phase=phase)

    assert found == (f"{phase}_prefetch gathers 2 units ahead instead of 1",)


def test_a_setting_cannot_raise_what_is_left_after_the_step() -> None:
    small, large = (manifest(config={"batch_size": size}) for size in (1, 2))

    found = find_causes(small, large, ACTIVATIONS, of_memory=True, phase="resting")

    assert found == ()


def test_a_batch_is_no_cause_of_more_than_its_own_growth() -> None:
    small, large = (manifest(config={"batch_size": size}) for size in (8, 9))

    assert causes(small, large, ACTIVATIONS) == []


def test_a_peak_that_moved_is_explained_if_a_cause_has_all_the_bytes_by_which_it_rose() -> None:
    growth = (*UNSHARDED, Increase("temporary", ("layers.1",), 0, 900))
    before, after = manifest(FREED), manifest(KEPT)

    assert causes(before, after, growth) == []
    options = {"of_memory": True}
    assert find_causes(before, after, growth, moved_by=400, **options) == ()
    (cause,) = find_causes(before, after, growth, moved_by=350, **options)
    assert "reshard_after_forward=False" in cause


@pytest.mark.parametrize(("rose", "is_explained"), [(400, True), (700, False)])
def test_a_larger_batch_explains_a_moved_peak_by_what_it_added_there(rose, is_explained) -> None:
    growth = (Increase("activation", ("layers.1",), 0, 1000),)
    before, after = (
        manifest().model_copy(update={"observed": {"inputs": [f"{rows} x 32 float32"]}})
        for rows in (16, 32)
    )
    found = find_causes(before, after, growth, of_memory=True, moved_by=rose)
    assert [each.startswith("the batch grew") for each in found] == [True] * is_explained


def test_offload_turned_off_is_the_cause_of_shards_on_the_device() -> None:
    growth = (Increase("sharded_parameter", ("layers.0",), 0, 100),)
    on, off = (
        manifest(plan={"units": [{"modules": [name], "offload": value} for name in LAYERS]})
        for value in ("cpu", "none")
    )

    assert causes(on, off, growth) == ["offload of all 3 units is none instead of cpu"]
    assert causes(off, on, growth) == []


def test_a_setting_that_the_baseline_does_not_contain_is_no_cause() -> None:
    assert causes(manifest(), manifest(observed={"dropout": "0.1 in 3 modules"})) == []


def test_another_mesh_is_a_cause_only_if_both_sides_record_it() -> None:
    one, two = (manifest(mesh=mesh) for mesh in ({"shard": 4}, {"replicate": 2, "shard": 2}))
    of_import = manifest(source="imported", mesh={})

    assert causes(one, two, of_memory=False) == ["the mesh is 2 x 2 instead of 4"]
    assert causes(one, of_import, of_memory=False) == causes(of_import, one, of_memory=False) == []


def test_prefetch_and_checkpointing_that_an_import_does_not_record_are_no_causes() -> None:
    full = {"full": ["layers.0"], "selective": []}
    recorded = manifest(plan={"forward_prefetch": 2, "checkpointing": full})
    of_import = manifest(source="imported", plan={})
    for of_memory in (True, False):
        for growth in (UNSHARDED, ACTIVATIONS):
            assert not causes(recorded, of_import, growth, of_memory=of_memory)
            assert not causes(of_import, recorded, growth, of_memory=of_memory)


def test_checkpointing_that_was_turned_on_is_no_cause_of_more_memory() -> None:
    on, off = (manifest(plan={"checkpointing": {"full": names}}) for names in (["layers.0"], []))
    (cause,) = causes(on, off)
    assert cause == "`layers.0` is not checkpointed"
    assert causes(off, on) == []


def test_damaged_names_in_a_plan_are_no_cause() -> None:
    plan = {"checkpointing": {"full": [7, ["layers.0"]]}, "forward_prefetch": {"layers.0": 3}}
    assert causes(manifest(plan=plan), manifest()) == []
    assert causes(manifest(), manifest(plan=plan)) == []


def test_a_larger_batch_is_the_cause_and_no_leak_is_suspected() -> None:
    small, large = (manifest(config={"batch_size": size, "lr": size}) for size in (1, 2))

    assert causes(small, large) == ["batch_size is 2 instead of 1"]
    assert causes(large, small) == []


def test_a_larger_model_is_said_in_parameters() -> None:
    small, large = manifest(), manifest({"num_parameters": 150})
    model = small.model.model_copy(update={"num_parameters": 450})
    large = large.model_copy(update={"model": model})

    assert causes(small, large) == ["the model has 450 parameters instead of 300"]


def test_a_few_more_parameters_are_no_cause_of_many_more_activations() -> None:
    small, large = manifest(), manifest({"num_parameters": 101})
    model = small.model.model_copy(update={"num_parameters": 303})

    assert causes(small, large.model_copy(update={"model": model})) == []


def test_parameters_of_an_output_layer_explain_gradients_that_did_not_exist_at_the_old_peak() -> (
    None
):
    """Before, the peak had the gradient of a bias only; the unit's new weight has one too."""
    small = manifest()
    large = manifest({"num_parameters": 200, "unsharded_bytes": 200})
    large = large.model_copy(
        update={"model": small.model.model_copy(update={"num_parameters": 600})}
    )
    growth = (
        Increase("unsharded_gradient", ("layers.2",), 1, 101),
        Increase("sharded_parameter", ("layers.2",), 50, 100),
    )
    said = ["the model has 600 parameters instead of 300"]
    assert causes(small, large, growth) == said
    assert causes(small, large, (*growth, Increase("temporary", ("layers.0",), 0, 100))) == []


@pytest.mark.parametrize("moved_by", [None, 4000])
def test_parameters_outside_all_units_are_a_cause_of_their_own_bytes(moved_by: int | None) -> None:
    small = manifest()
    large = small.model_copy(
        update={"model": small.model.model_copy(update={"num_parameters": 1300})}
    )
    copy = Increase("sharded_parameter", ("(no unit)",), 0, 4000)
    elsewhere = Increase("reduce_scatter_buffer", ("layers.0",), 0, 2000 if moved_by else 0)
    found = find_causes(small, large, (copy, elsewhere), of_memory=True, moved_by=moved_by)
    assert found == (
        "the model has 1,300 parameters instead of 300, 1,000 more of them outside all units",
    )
    larger = (Increase("sharded_parameter", ("(no unit)",), 0, 9000),)
    assert causes(small, large, larger) == []
    states = (Increase("optimizer_state", ("(no unit)",), 0, 1_000_000),)
    assert find_causes(small, large, states, of_memory=True, moved_by=1_000_000) == ()
