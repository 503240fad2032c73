"""Test that a changed setting is called a cause only if it explains the bytes."""

from typing import Any

import pytest

from fsdp_inspect.checks.causes import find_causes
from fsdp_inspect.checks.increases import Increase
from fsdp_inspect.trace.run import RunManifest
from tests.builders import RunBuilder

ACTIVATIONS = (Increase("activation", ("layers.0",), 10, 20),)
UNSHARDED = (Increase("unsharded_parameter", ("layers.0",), 0, 300),)
REDUCED = (Increase("reduce_scatter_buffer", ("layers.0",), 0, 300),)
STATES = (Increase("optimizer_state", ("layers.0",), 100, 150),)


def manifest(unit: dict[str, Any] | None = None, **settings: Any) -> RunManifest:
    builder = RunBuilder(("layers.0", "layers.1", "layers.2"), world_size=4, **settings)
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
    return list(find_causes(before, after, growth, of_memory=of_memory, of_time=not of_memory))


KEPT, FREED, PARTLY = ({"reshard_after_forward": value} for value in (False, True, 2))


@pytest.mark.parametrize(
    ("before", "after", "of_memory", "words"),
    [
        (FREED, KEPT, True, "`layers.*` now reshard_after_forward=False: +3 unsharded blocks"),
        (FREED, PARTLY, True, "now reshard_after_forward=2: 3 blocks sharded over only 2 ranks"),
        (KEPT, FREED, False, "now reshard_after_forward=True: backward gathers them again"),
        (KEPT, PARTLY, False, "now reshard_after_forward=2: backward gathers them again"),
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


def test_a_narrower_dtype_is_no_cause_of_more_memory() -> None:
    wide, narrow = ({"reduce_dtype": dtype} for dtype in ("float32", "bfloat16"))

    (wider,) = causes(manifest(narrow), manifest(wide), REDUCED)
    assert "now reduce_dtype=float32 instead of bfloat16" in wider
    assert causes(manifest(wide), manifest(narrow), REDUCED) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "growth"),
    [
        ("dropout", "none", "0.1 in 3 modules", ACTIVATIONS),
        ("attention", "sdpa", "eager", ACTIVATIONS),
        ("loss_dtype", "bfloat16", "float32", ACTIVATIONS),
        ("optimizer", "AdamW(amsgrad=False)", "AdamW(amsgrad=True)", STATES),
    ],
)
def test_an_observed_setting_is_the_cause_of_the_categories_that_it_raises(
    name: str, old: str, new: str, growth: tuple[Increase, ...]
) -> None:
    before, after = (manifest(observed={name: value}) for value in (old, new))

    assert causes(before, after, growth) == [f"{name} is {new} instead of {old}"]
    assert causes(before, after, REDUCED) == []


def test_a_setting_that_the_baseline_does_not_contain_is_no_cause() -> None:
    assert causes(manifest(), manifest(observed={"dropout": "0.1 in 3 modules"})) == []


def test_checkpointing_that_was_turned_on_is_no_cause_of_more_memory() -> None:
    on, off = (manifest(plan={"checkpointing": {"full": names}}) for names in (["layers.0"], []))
    (cause,) = causes(on, off)
    assert cause.startswith("checkpointing is {'full': []} instead of")
    assert causes(off, on) == []


def test_a_larger_batch_is_the_cause_and_no_leak_is_suspected() -> None:
    small, large = (manifest(config={"batch_size": size, "lr": size}) for size in (1, 2))

    assert causes(small, large) == ["batch_size is 2 instead of 1"]
    assert causes(large, small) == []


def test_a_larger_model_is_said_in_parameters() -> None:
    small = manifest()
    model = small.model.model_copy(update={"num_parameters": 1400})

    assert causes(small, small.model_copy(update={"model": model})) == [
        "the model has 1,400 parameters instead of 300"
    ]
